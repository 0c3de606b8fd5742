"""Runs a function of a test module in several real processes that are connected as a launch would connect them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
CPU_ONLY = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}  # also on a machine with GPUs


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    timeout_seconds: float = 240,
    accelerator: str = "cpu",
    **arguments: Any,
) -> list[Any]:
    """Call ``function(**arguments)`` on every rank; returns what each rank returned (JSON values), by rank.

    torchrun picks a free port by itself, so that launches do not meet.
    """
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "arguments.json").write_text(json.dumps(arguments))
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--log-dir", folder,
            f"--nproc_per_node={world_size}",
            "-m", "tests.support.rank_worker", f"{function.__module__}:{function.__qualname__}", folder,
        ]  # fmt: skip
        finished = run_bounded(command, timeout_seconds, {"DS_ACCELERATOR": accelerator})
        assert finished.returncode == 0, finished.stdout[-6000:]
        return [json.loads((Path(folder) / f"rank_{rank}.json").read_text()) for rank in range(world_size)]


def run_bounded(
    command: list[str], timeout_seconds: float, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command that starts processes; past its time limit the whole group of them is ended.

    Output and errors come together in ``stdout``.
    """
    variables = {**os.environ, **CPU_ONLY, **(environment or {})}
    process = subprocess.Popen(
        command, cwd=REPOSITORY, env=variables, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"no end within {timeout_seconds} s: {' '.join(command)}\n{output[-6000:]}") from None
    return subprocess.CompletedProcess(command, process.returncode, output)
