"""Ranks whose launcher dies, whichever of its processes and of what: they save where they can, and none stays."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from megastable.checkpoints.folder import folder_name, step_folders
from megastable.engine.hostfile import NODE_LAUNCHER
from megastable.engine.launcher_watch import has_ended
from tests.support.launches import (
    DEEPSPEED,
    TORCHRUN,
    assert_holds_no_run,
    metrics,
    start,
    train_command,
    wait_for_step,
    write_run_file,
)

START_WITHIN_SECONDS = 300
GONE_WITHIN_SECONDS = 150
"""The ranks notice within a second; the rest is a step, a save and the end of the interpreters on a busy machine."""
ENDLESS = {"megastable__training": {"total_steps": 1_000_000, "seed": 7}}


class Launched:
    """Is a real launch and all of its processes, which are known by their ids from here on."""

    def __init__(self, command: list[str], run_dir: Path) -> None:
        self.run_dir = run_dir
        self._launcher = start(command)
        self.outer = psutil.Process(self._launcher.pid)
        self._known: dict[int, psutil.Process] = {self.outer.pid: self.outer}

    def look(self) -> None:
        """Get to know the processes that there are by now."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in list(self._known.values()):
                self._known.update((child.pid, child) for child in process.children(recursive=True))

    def wait_for(self, condition: Callable[[], bool], timeout_seconds: float = START_WITHIN_SECONDS) -> None:
        """Look until the condition holds."""
        deadline = time.monotonic() + timeout_seconds
        while not condition():
            assert time.monotonic() < deadline
            self.look()
            time.sleep(0.02)

    def wait_for_step(self, step: int) -> None:
        """Wait until the run has done a step."""
        wait_for_step(self._launcher, self.run_dir, step, START_WITHIN_SECONDS)
        self.look()

    def find(self, mark: str) -> list[psutil.Process]:
        """Return the known processes with a word in their command line."""
        found = []
        for process in self._known.values():
            with contextlib.suppress(psutil.Error):
                if any(mark in word for word in process.cmdline()):
                    found.append(process)
        return found

    def ranks(self) -> dict[str, psutil.Process]:
        """Return the ranks that have got as far as their own variables."""
        found = {}
        for process in self._known.values():
            with contextlib.suppress(psutil.Error, KeyError):
                found[process.environ()["RANK"]] = process
        return found

    def end(self) -> str:
        """Wait until all processes have ended, and return what was printed."""
        self.wait_for(lambda: all(has_ended(process) for process in self._known.values()), GONE_WITHIN_SECONDS)
        return self._launcher.communicate(timeout=10)[0]

    def close(self) -> None:
        """End what a failed test has left."""
        for process in self._known.values():
            with contextlib.suppress(psutil.Error):
                process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired, ValueError):
            self._launcher.communicate(timeout=10)


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    """Launch an endless run on two ranks; what is left of it ends with the test."""
    launched = []
    run_file = write_run_file(tmp_path, **ENDLESS)

    def launch(launcher: list[str], module: str | None = None) -> Launched:
        run_dir = tmp_path / "run"
        command = train_command(launcher, run_file, run_dir)
        if module is not None:
            command = [*launcher, "--module", module, str(run_file), str(run_dir)]
        launched.append(Launched(command, run_dir))
        return launched[-1]

    yield launch
    for each in launched:
        each.close()


def inner(launched: Launched) -> psutil.Process:
    """Return DeepSpeed's launcher of a node."""
    (process,) = [process for process in launched.find(NODE_LAUNCHER) if process.pid != launched.outer.pid]
    return process


def outer(launched: Launched) -> psutil.Process:
    """Return the command itself."""
    return launched.outer


exhaustive = pytest.mark.exhaustive


@pytest.mark.parametrize(
    ("launcher", "victim", "number"),
    [
        pytest.param(DEEPSPEED, outer, signal.SIGTERM, marks=pytest.mark.slow, id="deepspeed-outer-TERM"),
        pytest.param(DEEPSPEED, outer, signal.SIGKILL, marks=exhaustive, id="deepspeed-outer-KILL"),
        pytest.param(DEEPSPEED, outer, signal.SIGINT, marks=exhaustive, id="deepspeed-outer-INT"),
        pytest.param(DEEPSPEED, outer, signal.SIGHUP, marks=exhaustive, id="deepspeed-outer-HUP"),
        pytest.param(DEEPSPEED, inner, signal.SIGTERM, marks=exhaustive, id="deepspeed-inner-TERM"),
        pytest.param(DEEPSPEED, inner, signal.SIGKILL, marks=exhaustive, id="deepspeed-inner-KILL"),
        pytest.param(DEEPSPEED, inner, signal.SIGHUP, marks=exhaustive, id="deepspeed-inner-HUP"),
        pytest.param(TORCHRUN, outer, signal.SIGTERM, marks=exhaustive, id="torchrun-TERM"),
        pytest.param(TORCHRUN, outer, signal.SIGKILL, marks=exhaustive, id="torchrun-KILL"),
        pytest.param(TORCHRUN, outer, signal.SIGHUP, marks=exhaustive, id="torchrun-HUP"),
        pytest.param(TORCHRUN, outer, signal.SIGUSR1, marks=exhaustive, id="torchrun-USR1"),
    ],
)
def test_ranks_save_and_end_when_a_process_of_their_launcher_is_ended(
    launch: Callable[..., Launched], launcher: list[str], victim: Callable[[Launched], psutil.Process], number: int
) -> None:
    launched = launch(launcher)
    launched.wait_for_step(3)
    victim(launched).send_signal(number)
    output = launched.end()
    step = len(metrics(launched.run_dir))
    assert [path.name for path in step_folders(launched.run_dir / "checkpoints")] == [folder_name(step)], output
    assert f"the run stops at step {step}" in output and "--resume goes on from" in output, output
    # Of some signals the launchers themselves make a traceback.
    assert re.search(r'File "[^"]*/(megastable/|launch/train)', output) is None, output


@exhaustive
@pytest.mark.parametrize("launcher", [DEEPSPEED, TORCHRUN], ids=["deepspeed", "torchrun"])
def test_ctrl_c_reaches_all_processes_at_once_and_the_ranks_save(
    launch: Callable[..., Launched], launcher: list[str]
) -> None:
    """The launcher passes on what its ranks have got already, which is no second signal."""
    launched = launch(launcher)
    launched.wait_for_step(3)
    if launcher is TORCHRUN:
        # It gives its ranks sessions of their own, which a terminal does not reach.
        os.kill(launched.outer.pid, signal.SIGINT)
    else:
        os.killpg(launched.outer.pid, signal.SIGINT)
    output = launched.end()
    step = len(metrics(launched.run_dir))
    assert [path.name for path in step_folders(launched.run_dir / "checkpoints")] == [folder_name(step)], output
    assert "once more" not in output


@exhaustive
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_process_stays_of_a_deepspeed_that_ends_before_its_ranks_begin(
    launch: Callable[..., Launched], number: int
) -> None:
    launched = launch(DEEPSPEED)
    launched.wait_for(lambda: len(launched.find(NODE_LAUNCHER)) > 0)
    launched.outer.send_signal(number)
    launched.wait_for(lambda: len(launched.find("--local_rank=1")) == 1)
    output = launched.end()
    assert "lost its launcher: its outer process had ended before" in output, output
    assert_holds_no_run(launched.run_dir)


@exhaustive
def test_no_process_stays_of_a_torchrun_that_ends_before_its_ranks_begin(launch: Callable[..., Launched]) -> None:
    launched = launch(TORCHRUN)
    launched.wait_for(lambda: len(launched.ranks()) == 2)
    launched.outer.kill()
    output = launched.end()
    assert "lost its launcher: it had ended before" in output, output
    assert_holds_no_run(launched.run_dir)


@exhaustive
@pytest.mark.parametrize("launcher", [DEEPSPEED, TORCHRUN], ids=["deepspeed", "torchrun"])
def test_a_rank_that_hangs_and_one_that_is_stopped_end_without_their_launcher(
    launch: Callable[..., Launched], launcher: list[str]
) -> None:
    launched = launch(launcher, module="tests.support.short_of_patience")
    launched.wait_for_step(3)
    launched.ranks()["1"].suspend()
    for process in launched.find(NODE_LAUNCHER) or [launched.outer]:
        process.kill()
    output = launched.end()
    assert "the ranks had not saved and left 10 s later" in output, output
