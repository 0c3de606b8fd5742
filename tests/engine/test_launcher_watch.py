"""Which processes are a rank's launcher, and that their end shows; on trees of small real processes."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from megastable.engine.hostfile import NODE_LAUNCHER, WORLD_INFO
from megastable.engine.launcher_watch import LauncherWatch, launch_created

TIME_LIMIT_SECONDS = 60
SLEEP = "import time; time.sleep(300)"
PARENT = f"import subprocess, sys; child = subprocess.Popen(sys.argv[sys.argv.index('--') + 1:]); {SLEEP}"
RANK = {"RANK": "1", "WORLD_SIZE": "2"}
TORCHRUN = {**RANK, "TORCHELASTIC_RUN_ID": "none"}
DEEPSPEED = {**RANK, "CROSS_SIZE": "1"}
ALONE = WORLD_INFO + base64.urlsafe_b64encode(json.dumps({"localhost": [0, 1]}).encode()).decode()


def python_parent(*marks: str) -> list[str]:
    """Return a command that starts the command behind it; ``marks`` stand in its command line."""
    return [sys.executable, "-c", PARENT, *marks, "--"]


SHELL = ["bash", "-c", '"$@"; true', "bash"]
INNER_DEEPSPEED = python_parent(NODE_LAUNCHER, ALONE)


def with_variables(*words: str) -> list[str]:
    """Return a command whose process has a rank's variables."""
    return ["env", *(f"{name}={value}" for name, value in RANK.items()), *words]


RANK_COMMAND = with_variables(sys.executable, "-c", SLEEP)


class Chain:
    """Runs processes each of which has started the next; the last one is a rank."""

    def __init__(self, *commands: list[str]) -> None:
        self._outermost = subprocess.Popen([word for command in commands for word in command], start_new_session=True)
        outermost = psutil.Process(self._outermost.pid)
        deadline = time.monotonic() + TIME_LIMIT_SECONDS
        while len(outermost.children(recursive=True)) < len(commands) - 1:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        self.processes = [outermost, *outermost.children(recursive=True)]
        self.rank = self.processes[-1]

    def kill(self, position: int) -> None:
        """Kill one process, of which the first is the outermost, without waiting for it."""
        self.processes[position].kill()

    def close(self) -> None:
        """End all that still run."""
        for process in self.processes:
            if process.is_running():
                process.kill()
        self._outermost.wait()


@pytest.fixture
def chain() -> Iterator[Callable[..., Chain]]:
    """Start chains of processes, which end with the test."""
    chains: list[Chain] = []

    def start(*commands: list[str]) -> Chain:
        chains.append(Chain(*commands))
        return chains[-1]

    yield start
    for started in chains:
        started.close()


def wait_for_loss(watch: LauncherWatch) -> str:
    deadline = time.monotonic() + TIME_LIMIT_SECONDS
    while (loss := watch.loss()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return loss


@pytest.mark.parametrize("position", [0, 1])
@pytest.mark.parametrize(
    ("commands", "variables"),
    [
        pytest.param((python_parent(), INNER_DEEPSPEED, RANK_COMMAND), DEEPSPEED, id="both processes of deepspeed"),
        pytest.param((python_parent(), with_variables(*SHELL), RANK_COMMAND), RANK, id="a wrapper of the rank"),
    ],
)
def test_every_process_of_a_launcher_is_watched(
    chain: Callable[..., Chain], commands: tuple[list[str], ...], variables: dict[str, str], position: int
) -> None:
    started = chain(*commands)
    watch = LauncherWatch.of(started.rank, variables)
    assert watch.loss() is None
    started.kill(position)
    assert wait_for_loss(watch).startswith(f"process {started.processes[position].pid} (")


@pytest.mark.parametrize(
    ("commands", "variables"),
    [
        pytest.param((SHELL, [sys.executable, "-c", SLEEP]), {}, id="a run by hand"),
        pytest.param((python_parent(), [sys.executable, "-c", SLEEP]), {}, id="a run of another program"),
        pytest.param((SHELL, RANK_COMMAND), RANK, id="ranks started by hand"),
        pytest.param((SHELL, python_parent(), RANK_COMMAND), TORCHRUN, id="the shell above torchrun"),
        pytest.param((SHELL, INNER_DEEPSPEED, RANK_COMMAND), DEEPSPEED, id="the shell above deepspeed"),
        pytest.param((python_parent(), python_parent(), RANK_COMMAND), TORCHRUN, id="a program above torchrun"),
    ],
)
def test_a_run_outlives_what_is_no_launcher(
    chain: Callable[..., Chain], commands: tuple[list[str], ...], variables: dict[str, str]
) -> None:
    """As nohup promises of a shell."""
    started = chain(*commands)
    watch = LauncherWatch.of(started.rank, variables)
    started.kill(0)
    time.sleep(0.3)
    assert watch.loss() is None


@pytest.mark.skipif(psutil.Process(1).name().startswith("python"), reason="orphans belong to a Python program here")
@pytest.mark.parametrize("position", [0, 1])
def test_a_launcher_that_had_ended_before_is_missed(chain: Callable[..., Chain], position: int) -> None:
    started = chain(python_parent(), INNER_DEEPSPEED, RANK_COMMAND)
    started.kill(position)
    orphan = started.processes[position + 1]
    deadline = time.monotonic() + TIME_LIMIT_SECONDS
    while orphan.ppid() == started.processes[position].pid:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert LauncherWatch.of(started.rank, DEEPSPEED).loss() is not None
    # Ranks that a script has started may outlive it.
    assert LauncherWatch.of(started.rank, RANK).loss() is None or position == 0


def test_restarts_of_torchrun_do_not_begin_a_launch(chain: Callable[..., Chain]) -> None:
    started = chain(python_parent(), RANK_COMMAND)
    agent, rank = started.processes
    assert launch_created(rank, {**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "0"}) == rank.create_time()
    assert launch_created(rank, {**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "2"}) == agent.create_time()
    assert launch_created(rank, RANK) == rank.create_time()
