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
TERMINATION_SECONDS = 5.0


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    timeout_seconds: float = 240,
    accelerator: str = "cpu",
    **arguments: Any,
) -> list[Any]:
    """Call ``function(**arguments)`` on every rank; returns what each rank returned (JSON values), by rank.

    The first rank that fails ends the others, as does the time limit. They meet through a store at a port that the
    system picks, so that launches do not meet.
    """
    with hosted_store() as port, tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        (folder / "arguments.json").write_text(json.dumps(arguments))
        name = (function.__module__, function.__qualname__)
        exit_codes = run_processes(
            [(_run_rank, (*name, folder, torchrun_variables(rank, world_size, port))) for rank in range(world_size)],
            timeout_seconds,
            accelerator,
        )
        outputs = [(folder / f"output_{rank}.txt") for rank in range(world_size)]
        shown = "\n".join(f"{path.name}:\n{path.read_text()[-3000:]}" for path in outputs if path.exists())
        assert exit_codes == [0] * world_size, (
            f"{function.__qualname__} failed or took over {timeout_seconds} s; exit codes {exit_codes}\n{shown}"
        )
        return [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(world_size)]


@contextlib.contextmanager
def hosted_store() -> Iterator[int]:
    """Hold the store through which ranks meet, as torchrun's agent does; yields its port, which the system picks."""
    from torch._C._distributed_c10d import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port


def torchrun_variables(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Return what torchrun tells a rank of one machine, whose agent holds the store at ``port``."""
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "none",
    }  # fmt: skip


def fork_server() -> ForkServerContext:
    """Return the context whose processes are forked from a server that has imported torch and DeepSpeed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([RANK_WORKER])
    return context


def run_processes(
    targets: list[tuple[Callable[..., None], tuple[Any, ...]]], timeout_seconds: float, accelerator: str = "cpu"
) -> list[int | None]:
    """Call each function in a process of its own, and return their exit codes.

    The first process that fails ends the others, as does the time limit: with SIGTERM first, as launchers do, so that
    they can report what they miss.
    """
    with _environment({**CPU_ONLY, "DS_ACCELERATOR": accelerator}):
        context: ForkServerContext | SpawnContext
        context = fork_server() if accelerator == "cpu" else multiprocessing.get_context("spawn")
        processes: list[BaseProcess] = [context.Process(target=target, args=args) for target, args in targets]
        for process in processes:
            process.start()
    try:
        _wait_for_all(processes, timeout_seconds)
        for process in processes:
            if process.exitcode is None:
                process.terminate()
        _wait_for_each(processes, TERMINATION_SECONDS)
    finally:
        for process in processes:
            _kill_with_children(process)
    return [process.exitcode for process in processes]


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


def _wait_for_each(processes: list[BaseProcess], timeout_seconds: float) -> None:
    """Return when all have ended, well or not, or the time is over."""
    deadline = time.monotonic() + timeout_seconds
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))


def _kill_with_children(process: BaseProcess) -> None:
    """End a process that still runs, and what it has started: a rank leads a process group."""
    if process.exitcode is None and process.pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        # The group is made in the process's first lines, which it may not have reached.
        process.kill()
    process.join()


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
