"""How processes meet: at addresses of this machine alone, and without leaving files."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed

from megastable.core.errors import UserError
from megastable.core.launch import LOOPBACK, Launch
from megastable.engine import rendezvous
from megastable.engine.process_group import connected
from megastable.engine.rendezvous import GLOO_INTERFACE, launcher_of
from tests.support.launches import write_run_file
from tests.support.ranks import CPU_ONLY, REPOSITORY, fork_server, hosted_store, torchrun_variables

TIME_LIMIT_SECONDS = 60
LATE_SECONDS = 2.0
"""Long enough for the other rank to look for the port before."""


def connect(queue: Any, rank: int, port: int, folder: str) -> None:
    """Meet as one of two processes of ``deepspeed``; answers the addresses at which this process listens."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    tempfile.tempdir = folder
    variables = {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_SIZE": "2", "MASTER_PORT": str(port),
        # As where a hostfile names this machine alone.
        "MASTER_ADDR": socket.gethostname(),
    }  # fmt: skip
    with connected(Launch.detect(variables)) as peers:
        torch.distributed.barrier()
        # Groups of some of the ranks, as DeepSpeed makes them, open sockets of their own.
        torch.distributed.new_group([0, 1])
        own = psutil.Process().net_connections("inet")
        listening = [entry.laddr.ip for entry in own if entry.status == psutil.CONN_LISTEN]
        assert {address.address for address in psutil.net_if_addrs()[os.environ[GLOO_INTERFACE]]} >= {LOOPBACK}
        queue.put((rank, [peer.rank for peer in peers], listening))
        torch.distributed.barrier()


def meet(port: int, folder: Path, rank_0_is_late: bool = False) -> list[tuple[int, list[int], list[str]]]:
    """Let two processes meet at a port and return what they answered."""
    context = fork_server()
    queue = context.Queue()
    processes = [context.Process(target=connect, args=(queue, rank, port, str(folder))) for rank in range(2)]
    processes[1].start()
    if rank_0_is_late:
        time.sleep(LATE_SECONDS)
    processes[0].start()
    try:
        found = [queue.get(timeout=TIME_LIMIT_SECONDS) for _ in processes]
        for process in processes:
            process.join(TIME_LIMIT_SECONDS)
        assert [process.exitcode for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    return sorted(found)


def meet_in_hosted_store(queue: Any, rank: int, world_size: int, port: int) -> None:
    """Meet as a rank of torchrun; answers the processes whose notes it finds in the store."""
    store = rendezvous.rendezvous(Launch.detect(torchrun_variables(rank, world_size, port)))
    store.set(f"process/{rank}", str(os.getpid()))
    queue.put((rank, [int(store.get(f"process/{other}")) for other in range(world_size)]))
    store.set(f"done/{rank}", "")
    store.wait([f"done/{other}" for other in range(world_size)])


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("port", ["default", "given"])
def test_nothing_listens_to_other_machines_on_a_single_node(port: str, tmp_path: Path) -> None:
    found = meet(29500 if port == "default" else free_port(), tmp_path)
    for rank, peers, listening in found:
        assert peers == [0, 1]
        # The store of rank 0 and gloo of both.
        assert len(listening) >= (2 if rank == 0 else 1)
        assert set(listening) == {"127.0.0.1"}
    assert list(tmp_path.glob("megastable-*")) == []


def test_a_restarted_launch_reads_nothing_of_the_attempts_before() -> None:
    """torchrun keeps its store over restarts, also where fewer or more processes come than before."""
    context = fork_server()
    with hosted_store() as port:
        # A rank whose attempt ended before rank 0 had come.
        alone = context.Process(target=meet_in_hosted_store, args=(context.Queue(), 1, 2, port))
        alone.start()
        for world_size in (2, 3, 2, 2):
            queue = context.Queue()
            ranks = [
                context.Process(target=meet_in_hosted_store, args=(queue, rank, world_size, port))
                for rank in reversed(range(world_size))
            ]
            # Those that wait for rank 0 find what was left by the last attempt meanwhile.
            for process in ranks[:-1]:
                process.start()
            time.sleep(0.3)
            alone.kill()
            ranks[-1].start()
            try:
                found = dict(queue.get(timeout=TIME_LIMIT_SECONDS) for _ in ranks)
                for process in ranks:
                    process.join(TIME_LIMIT_SECONDS)
            finally:
                for process in ranks:
                    process.kill()
            assert list(found.values()) == [[process.pid for process in reversed(ranks)]] * world_size


def publish(folder: Path, launcher: str) -> subprocess.Popen[str]:
    """Start a rank 0 that publishes its port below ``launcher``'s name and waits for others that never come."""
    script = """
import os, pathlib, sys
from megastable.core.launch import Launch
from megastable.engine import rendezvous
launch = Launch(0, 0, 2, 2, "127.0.0.1", 29500, port_is_default=True)
rendezvous._publish_port(launch, pathlib.Path(sys.argv[1]))
"""
    file = folder / f"megastable-{os.getuid()}-{launcher}.port"
    process = subprocess.Popen([sys.executable, "-c", script, str(file)], cwd=REPOSITORY, text=True)
    deadline = time.monotonic() + TIME_LIMIT_SECONDS
    while not file.exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    return process


def test_files_of_launches_that_ended_are_removed_and_those_of_living_ones_kept(tmp_path: Path) -> None:
    alive = publish(tmp_path, "alive")
    try:
        ended = publish(tmp_path, "ended")
        ended.send_signal(signal.SIGKILL)
        ended.wait(TIME_LIMIT_SECONDS)
        other = tmp_path / "megastable-notes.port"
        other.write_text("of somebody else")
        (left,) = tmp_path.glob("*ended.port")
        assert not rendezvous._is_held(left)
        meet(29500, tmp_path)
        assert sorted(path.name for path in tmp_path.iterdir()) == [
            f"megastable-{os.getuid()}-alive.port",
            "megastable-notes.port",
        ]
    finally:
        alive.kill()
        alive.wait(TIME_LIMIT_SECONDS)


def test_files_that_were_never_named_are_removed_once_no_launch_can_be_about_to(tmp_path: Path) -> None:
    abandoned, fresh, other = (
        tmp_path / name for name in (f"megastable-{os.getuid()}-1.7.tmp", f"megastable-{os.getuid()}-2.8.tmp", "a.tmp")
    )
    for path in (abandoned, fresh, other):
        path.touch()
    long_ago = time.time() - rendezvous.CONNECT_TIMEOUT.total_seconds() - 1
    for path in (abandoned, other):
        os.utime(path, (long_ago, long_ago))
    rendezvous._remove_abandoned_files(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([fresh, other])


def test_the_file_of_an_ended_launch_of_the_same_launcher_is_not_read(tmp_path: Path) -> None:
    """Both launches have this process's fork server as their launcher, and so one name for their file.

    Rank 0 removes it, so that only a rank that comes earlier can read it.
    """
    meet(29500, tmp_path)  # starts the server
    (launcher,) = [child for child in psutil.Process().children() if "forkserver" in " ".join(child.cmdline())]
    name = f"megastable-{os.getuid()}-{launcher.pid}-{launcher.create_time():.2f}.port"
    (tmp_path / name).write_text(str(free_port()))  # nobody listens there
    assert [peers for _, peers, _ in meet(29500, tmp_path, rank_0_is_late=True)] == [[0, 1], [0, 1]]


def test_a_port_that_is_taken_after_the_first_look_is_refused() -> None:
    for nodes in (1, 2):
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            launch = Launch(0, 0, 2, 2 // nodes, socket.gethostname(), port, port_is_default=False)
            with pytest.raises(UserError, match=f"MASTER_PORT: .*{port}"):
                rendezvous.rendezvous(launch)


def test_an_abandoned_file_is_one_that_no_process_holds(tmp_path: Path) -> None:
    path = tmp_path / "file.port"
    assert not rendezvous._is_held(path)
    with open(path, "w") as file:
        assert not rendezvous._is_held(path)
        fcntl.flock(file, fcntl.LOCK_EX)
        assert rendezvous._is_held(path)
    assert not rendezvous._is_held(path)


class FakeProcess:
    """Stands for an ancestor with an environment, or for one of another user."""

    def __init__(self, environment: dict[str, str] | None) -> None:
        self.environment = environment

    def environ(self) -> dict[str, str]:
        if self.environment is None:
            raise psutil.AccessDenied
        return self.environment


@pytest.mark.parametrize("launcher", [{}, {"SLURM_PROCID": "0"}, None], ids=["mpirun", "a batch script", "root's"])
def test_wrappers_of_a_rank_are_not_the_launcher(launcher: dict[str, str] | None) -> None:
    above = [FakeProcess({"PMI_RANK": "1", "RANK": "1"}), FakeProcess({"PMI_RANK": "1"}), FakeProcess(launcher)]

    class Rank:
        def parents(self) -> list[FakeProcess]:
            return [*above, FakeProcess({})]

    assert launcher_of(Rank()) is above[2]


WAITING = """
import runpy, sys
from datetime import timedelta
from megastable.engine import rendezvous
rendezvous.CONNECT_TIMEOUT = timedelta(seconds=2)
runpy.run_path("launch/train.py", run_name="__main__")
"""


@pytest.mark.parametrize(
    ("rank", "per_node", "port", "what"),
    [
        (0, 1, "free", "1 of 2 processes have come to HOST, port PORT; after 0:00:02"),
        pytest.param(1, 1, "free", "rank 1 has not reached rank 0 at HOST, port PORT", marks=pytest.mark.slow),
        (0, 2, "29500", "1 of 2 processes have come to 127.0.0.1, port "),
        pytest.param(1, 2, "29500", "rank 1 has not found rank 0, whose port would stand in ", marks=pytest.mark.slow),
    ],
)
def test_a_process_that_never_comes_is_one_message(
    rank: int, per_node: int, port: str, what: str, tmp_path: Path
) -> None:
    if port == "free":
        port = str(free_port())
    host = socket.gethostname()
    place = {
        "RANK": str(rank), "LOCAL_RANK": str(rank % per_node), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": str(per_node),
        "MASTER_ADDR": host, "MASTER_PORT": port, "TMPDIR": str(tmp_path),
    }  # fmt: skip
    ended = subprocess.run(
        [
            sys.executable, "-c", WAITING, "--deepspeed_config", str(write_run_file(tmp_path)),
            "--run-dir", str(tmp_path / "run"),
        ],
        cwd=REPOSITORY, env={**os.environ, **CPU_ONLY, **place}, capture_output=True, text=True,
        timeout=TIME_LIMIT_SECONDS,
    )  # fmt: skip
    assert ended.returncode == 2, ended.stderr
    (message,) = [line for line in ended.stderr.splitlines() if "[megastable] error" in line]
    assert what.replace("HOST", host).replace("PORT", port) in message
    assert "MASTER_ADDR" in message and "Traceback" not in ended.stderr
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
