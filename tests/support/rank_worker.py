"""One rank of ``run_ranks`` or ``run_script``: a function on connected ranks, or a script as a launcher starts it.

On CPU every rank is forked from one server that has imported this module, so that torch and DeepSpeed are imported once
a test run and not once a rank. The server starts no threads and no process group; each rank has its own.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401  # with torch's compiler, half of a first engine's time
import torch._dynamo  # noqa: F401

from megastable.core.launch import Launch
from megastable.engine.process_group import connected
from megastable.training import build  # noqa: F401

REPOSITORY = Path(__file__).parents[2]


def run_rank(module: str, name: str, folder: Path, environment: dict[str, str]) -> None:
    """Be the rank that ``environment`` says; what is printed goes to a file in ``folder``."""
    rank = environment["RANK"]
    _begin(folder / f"output_{rank}.txt", environment)
    arguments = json.loads((folder / "arguments.json").read_text())
    with connected(Launch.detect(os.environ)):
        result = getattr(importlib.import_module(module), name)(**arguments)
        (folder / f"rank_{rank}.json").write_text(json.dumps(result))


def run_script(
    words: list[str], output: Path, environment: dict[str, str], first: tuple[str, str, dict[str, Any]] | None
) -> None:
    """Be ``python words...``: the process ends with the script's exit code.

    Args:
        words: a script and its arguments.
        output: file that gets what is printed.
        environment: variables that a launcher would set.
        first: module, name and arguments of a function that is called before the script.
    """
    _begin(output, environment)
    script = REPOSITORY / words[0]
    # Python puts the folder of the script first. What the test process has besides, a start would not have.
    benchmarks = REPOSITORY / "benchmarks"
    sys.path[:] = [str(script.parent), *(path for path in sys.path if not Path(path).is_relative_to(benchmarks))]
    sys.argv = words
    if first is not None:
        module, name, arguments = first
        getattr(importlib.import_module(module), name)(**arguments)
    runpy.run_path(str(script), run_name="__main__")


def _begin(output: Path, environment: dict[str, str]) -> None:
    """Take the place in the launch, in a process group of its own, so that what it starts can be ended with it."""
    os.setpgid(0, 0)
    os.environ.update(environment)
    os.chdir(REPOSITORY)
    file = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
