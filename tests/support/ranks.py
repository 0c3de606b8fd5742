"""Runs a function of a test module in several real processes that are connected as a launch would connect them."""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
CPU_ONLY = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}  # also on a machine with GPUs
RANK_WORKER = "tests.support.rank_worker"


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    timeout_seconds: float = 240,
    accelerator: str = "cpu",
    **arguments: Any,
) -> list[Any]:
    """Call ``function(**arguments)`` on every rank; returns what each rank returned (JSON values), by rank.

    The first rank that fails ends the others, as does the time limit. The store through which they meet is held here,
    at a port that the system picks, so that launches do not meet.
    """
    from torch._C._distributed_c10d import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {
        "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size), "TORCHELASTIC_USE_AGENT_STORE": "True",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        (folder / "arguments.json").write_text(json.dumps(arguments))
        with _environment({**CPU_ONLY, "DS_ACCELERATOR": accelerator}):
            context: ForkServerContext | SpawnContext
            if accelerator == "cpu":
                context = multiprocessing.get_context("forkserver")
                context.set_forkserver_preload([RANK_WORKER])
            else:
                context = multiprocessing.get_context("spawn")
            processes: list[BaseProcess] = [
                context.Process(
                    target=_run_rank,
                    args=(function.__module__, function.__qualname__, folder, {**common, "RANK": str(rank)}),
                )
                for rank in range(world_size)
            ]
            for process in processes:
                process.start()
        try:
            _wait_for_all(processes, timeout_seconds)
        finally:
            for process in processes:
                process.kill()
                process.join()
        outputs = [(folder / f"output_{rank}.txt") for rank in range(world_size)]
        shown = "\n".join(f"{path.name}:\n{path.read_text()[-3000:]}" for path in outputs if path.exists())
        assert all(process.exitcode == 0 for process in processes), (
            f"{function.__qualname__} failed or took over {timeout_seconds} s; exit codes "
            f"{[process.exitcode for process in processes]}\n{shown}"
        )
        return [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(world_size)]


def _run_rank(*arguments: Any) -> None:
    # Imported here, so that a test process does not load DeepSpeed.
    importlib.import_module(RANK_WORKER).run_rank(*arguments)


def _wait_for_all(processes: list[BaseProcess], timeout_seconds: float) -> None:
    """Return when all have ended well, one has failed, or the time is over."""
    deadline = time.monotonic() + timeout_seconds
    while any(process.exitcode is None for process in processes) and time.monotonic() < deadline:
        if any(process.exitcode for process in processes):
            return
        time.sleep(0.02)


@contextlib.contextmanager
def _environment(changes: dict[str, str]) -> Iterator[None]:
    """Variables that processes started meanwhile inherit."""
    before = dict(os.environ)
    os.environ.update(changes)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


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
