"""A rank that waits ten seconds only for its end once its launcher is gone; as a module, launch/train.py with that."""

from __future__ import annotations

import sys
from pathlib import Path

from megastable.engine import stop_request
from megastable.training.entry import RunRequest, run_command

ORPHAN_SECONDS = 10.0


def main() -> int:
    """``short_of_patience run_file run_dir``"""
    run_file, run_dir = sys.argv[-2:]  # before them deepspeed puts an option of its own
    stop_request.ORPHAN_SECONDS = ORPHAN_SECONDS
    return run_command(RunRequest(run_file=Path(run_file), run_dir=Path(run_dir)))


if __name__ == "__main__":
    sys.exit(main())
