"""One rank of ``run_ranks``: connects, calls the function, writes what it returned.

On CPU every rank is forked from one server that has imported this module, so that torch and DeepSpeed are imported once
a test run and not once a rank. The server starts no threads and no process group; each rank has its own.
"""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path

import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401  # with torch's compiler, half of a first engine's time
import torch._dynamo  # noqa: F401

from megastable.core.launch import Launch
from megastable.engine.process_group import connected
from megastable.training import build  # noqa: F401


def run_rank(module: str, name: str, folder: Path, environment: dict[str, str]) -> None:
    """Be the rank that ``environment`` says; what is printed goes to a file in ``folder``."""
    rank = environment["RANK"]
    os.environ.update(environment, LOCAL_RANK=rank)
    output = os.open(folder / f"output_{rank}.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.setpgid(0, 0)  # of its own, so that what it starts can be ended with it
    arguments = json.loads((folder / "arguments.json").read_text())
    with connected(Launch.detect(os.environ)):
        result = getattr(importlib.import_module(module), name)(**arguments)
        (folder / f"rank_{rank}.json").write_text(json.dumps(result))
