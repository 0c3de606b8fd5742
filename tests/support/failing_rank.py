"""A fault in rank 1, whose third step raises; as a module, launch/train.py with the fault planted."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from megastable.engine.training_engine import TrainingEngine
from megastable.training.entry import run_command
from megastable.training.start import RunRequest


def plant_failure() -> None:
    """Let the third step of rank 1 raise, in this process."""
    train_batch = TrainingEngine.train_batch
    steps = []

    def fail_on_third(self: TrainingEngine, *arguments: Any, **options: Any) -> Any:
        steps.append(1)
        if os.environ["RANK"] == "1" and len(steps) == 3:
            raise RuntimeError("made to fail")
        return train_batch(self, *arguments, **options)

    TrainingEngine.train_batch = fail_on_third  # type: ignore[method-assign]


def main() -> int:
    """``failing_rank run_file run_dir``"""
    plant_failure()
    return run_command(RunRequest(run_file=Path(sys.argv[1]), run_dir=Path(sys.argv[2])))


if __name__ == "__main__":
    sys.exit(main())
