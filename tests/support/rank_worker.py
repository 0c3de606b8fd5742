"""One rank of ``run_ranks``: connects, calls the function, writes what it returned."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path

from megastable.core.launch import Launch
from megastable.engine.process_group import connected


def main() -> None:
    """``rank_worker module:function folder``"""
    module, _, name = sys.argv[1].partition(":")
    folder = Path(sys.argv[2])
    arguments = json.loads((folder / "arguments.json").read_text())
    launch = Launch.detect(os.environ)
    with connected(launch):
        result = getattr(importlib.import_module(module), name)(**arguments)
        (folder / f"rank_{launch.rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
