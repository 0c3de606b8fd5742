"""Starts the ranks of a run as torchrun would, but forked from one server that has imported torch and DeepSpeed.

A start takes a second instead of ten, so that hundreds of deaths fit into the time of a coffee.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import multiprocessing
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

from torch._C._distributed_c10d import TCPStore

REPOSITORY = Path(__file__).parents[2]
PRELOADED = ["megastable.training.build", "deepspeed.runtime.zero.muon.muon_optimizer", "torch._dynamo"]
"""The last two are half of what a first engine imports."""
LAUNCHER_NOTICES_SECONDS = 0.5
"""About what torchrun takes to see that a rank is gone; then it sends SIGTERM to the others."""
LAUNCHER_WAITS_SECONDS = 20.0
"""For ranks that were told to stop; then they are killed. torchrun waits for 30."""


@dataclass
class Ranks:
    """Holds the processes of one start; ``end`` leaves none of them."""

    processes: list[BaseProcess]
    outputs: list[Path]
    store: TCPStore
    """Through which the ranks meet; it lives as long as they do."""

    @property
    def exit_codes(self) -> list[int | None]:
        """Return how each rank ended: minus the signal where one did it, None where it runs."""
        return [process.exitcode for process in self.processes]

    def kill(self, rank: int) -> bool:
        """End ``rank`` with SIGKILL; tells whether it was still running."""
        process = self.processes[rank]
        if process.exitcode is not None:
            return False
        process.kill()
        process.join()
        return process.exitcode == -signal.SIGKILL

    def wait(self, seconds: float) -> bool:
        """Return whether all ranks end within so many seconds."""
        return wait_until(lambda: None not in self.exit_codes, seconds)

    def end_as_launcher(self) -> int:
        """End what runs on after a death, as torchrun does; returns how many ranks had to be killed."""
        if not self.wait(LAUNCHER_NOTICES_SECONDS):
            for process in self.processes:
                process.terminate()
            self.wait(LAUNCHER_WAITS_SECONDS)
        return self.end()

    def end(self) -> int:
        """Kill what still runs, and return how many ranks that were."""
        running = [process for process in self.processes if process.exitcode is None]
        for process in running:
            _kill_with_children(process)
        return len(running)

    def output(self, most_characters: int = 4000) -> str:
        """Return the last lines that each rank printed."""
        texts = [path.read_text(encoding="utf-8", errors="replace") for path in self.outputs]
        return "\n".join(f"rank {rank}:\n{text[-most_characters:]}" for rank, text in enumerate(texts) if text)


def start_ranks(words: list[str], world_size: int, folder: Path, first: Callable[[Path], None]) -> Ranks:
    """Start ``python words...`` on every rank of one machine.

    Args:
        words: a script of the repository and its arguments.
        folder: a new one, for what the ranks print and record.
        first: called in every rank before the script, with a file of its own; found by name, so it is at the top of a
            module.
    """
    folder.mkdir(parents=True)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    outputs = [folder / f"output_{rank}.txt" for rank in range(world_size)]
    processes: list[BaseProcess] = []
    for rank, output in enumerate(outputs):
        output.touch()
        variables = _torchrun_variables(rank, world_size, store.port)
        arguments = (words, output, variables, (first.__module__, first.__qualname__), folder / f"record_{rank}.txt")
        processes.append(context.Process(target=_be_rank, args=arguments))
    ranks = Ranks(processes, outputs, store)
    for process in processes:
        process.start()
    return ranks


def wait_until(has_come: Callable[[], bool], seconds: float, pause_seconds: float = 0.005) -> bool:
    """Return whether something comes true within so many seconds."""
    deadline = time.monotonic() + seconds
    while not has_come():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause_seconds)
    return True


def _be_rank(words: list[str], output: Path, variables: dict[str, str], first: tuple[str, str], record: Path) -> None:
    # A group of its own, so that what the rank starts can be ended with it.
    os.setpgid(0, 0)
    os.environ.update(variables)
    os.chdir(REPOSITORY)
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    # DeepSpeed collects several times, and would look through all of torch, in memory that is shared with the server.
    gc.freeze()
    module, name = first
    getattr(importlib.import_module(module), name)(record)
    sys.argv = words
    runpy.run_path(str(REPOSITORY / words[0]), run_name="__main__")


def _torchrun_variables(rank: int, world_size: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "none",
    }  # fmt: skip


def _kill_with_children(process: BaseProcess) -> None:
    if process.pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        # The group is made in the process's first lines, which it may not have reached.
        process.kill()
    process.join()
