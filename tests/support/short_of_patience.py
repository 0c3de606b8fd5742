"""A rank that waits ten seconds only for its end once its launcher is gone; as a module, launch/train.py with that."""

from __future__ import annotations

import sys
from pathlib import Path

from megastable.engine import stop_request
from megastable.training.entry import run_command
from megastable.training.start import RunRequest

ORPHAN_SECONDS = 10.0


def main() -> int:
    """``short_of_patience run_file run_dir``"""
    stop_request.ORPHAN_SECONDS = ORPHAN_SECONDS
    return run_command(RunRequest(run_file=Path(sys.argv[1]), run_dir=Path(sys.argv[2])))


if __name__ == "__main__":
    sys.exit(main())
