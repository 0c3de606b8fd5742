"""Connecting the processes of a run, and leaving again."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import deepspeed
import psutil
import torch
import torch.distributed
from deepspeed.accelerator import get_accelerator
from torch._C._distributed_c10d import Store, TCPStore

from megastable.core.errors import UserError
from megastable.core.host import threads_per_process
from megastable.core.launch import Launch
from megastable.engine.host_memory import keep_freed_memory

CONNECT_TIMEOUT = timedelta(minutes=10)
COLLECTIVE_TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True)
class Peer:
    """A process of this run, for telling which one is gone."""

    rank: int
    host: str
    process_id: int


@contextlib.contextmanager
def connected(launch: Launch) -> Iterator[list[Peer]]:
    """Join the process group of the run; yields all its processes. gloo on CPU, NCCL on NVIDIA GPUs.

    Raises:
        UserError: fewer GPUs on this node than processes.
    """
    _prepare_device(launch)
    store = _rendezvous(launch)
    # DeepSpeed compiles this extension for its inference all-reduce wherever it connects: a minute on a cold machine,
    # in a folder that two launches race for. Training has no use for it.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    backend = "gloo" if get_accelerator().device_name() == "cpu" else get_accelerator().communication_backend_name()
    # Sub-groups do not inherit the timeout of the world group; they read these defaults.
    c10d = torch.distributed.distributed_c10d
    for default in ("default_pg_timeout", "default_pg_nccl_timeout"):
        setattr(c10d, default, COLLECTIVE_TIMEOUT)
    torch.distributed.init_process_group(
        backend, store=store, rank=launch.rank, world_size=launch.world_size, timeout=COLLECTIVE_TIMEOUT
    )
    deepspeed.init_distributed(backend, auto_mpi_discovery=False, verbose=False, timeout=COLLECTIVE_TIMEOUT)
    try:
        yield _introduce(launch)
    except UserError:  # all ranks leave together
        torch.distributed.destroy_process_group()
        raise
    torch.distributed.barrier()
    # Left to the interpreter's exit, a group was seen to abort the process. After a failure it is left alone: taking
    # down a group with transfers under way can wait for ever.
    torch.distributed.destroy_process_group()


def check_equal_on_all_ranks(value: str, what: str) -> None:
    """Check that every rank has the same ``value``; collective.

    Raises:
        UserError: on every rank; the ranks that differ from rank 0 are named.
    """
    values: list[str] = [""] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    different = [rank for rank, other in enumerate(values) if other != values[0]]
    if different:
        raise UserError(f"{what} is not the same on all ranks: {different} differ from rank 0")


def missing_peers(peers: list[Peer]) -> list[Peer]:
    """Processes of this machine that are gone."""
    return [peer for peer in peers if peer.host == socket.gethostname() and not _is_running(peer.process_id)]


def _is_running(process_id: int) -> bool:
    try:
        return psutil.Process(process_id).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _prepare_device(launch: Launch) -> None:
    # DeepSpeed reads these by itself wherever it needs them.
    os.environ["LOCAL_RANK"] = str(launch.local_rank)
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(launch.rank), str(launch.world_size)
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        keep_freed_memory()
        torch.set_num_threads(threads_per_process(launch.local_world_size, os.environ))
        return
    if accelerator.device_count() == 1 and "SLURM_PROCID" in os.environ:
        os.environ["LOCAL_RANK"] = "0"  # SLURM may show each task its own GPU alone, as its first
    elif launch.local_rank >= accelerator.device_count():
        raise UserError(
            f"{launch.local_world_size} processes were started on {socket.gethostname()}, "
            f"which has {accelerator.device_count()} GPU(s)"
        )
    accelerator.set_device(int(os.environ["LOCAL_RANK"]))


def _rendezvous(launch: Launch) -> Store:
    """The store through which the processes find each other."""
    if launch.port_is_default and launch.single_node:
        return _local_rendezvous(launch)
    # Under torchrun its agent holds the store already.
    master = launch.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    return TCPStore(
        launch.master_addr, launch.master_port, launch.world_size, is_master=master, timeout=CONNECT_TIMEOUT
    )


def _local_rendezvous(launch: Launch) -> Store:
    """Agree on a free port by a file named after the common parent, so that two runs on one machine never meet."""
    if launch.world_size == 1:
        return TCPStore("127.0.0.1", 0, 1, is_master=True)
    parent = psutil.Process(os.getppid())
    name = f"megastable-{os.getuid()}-{parent.pid}-{parent.create_time():.2f}.port"
    port_file = Path(tempfile.gettempdir()) / name
    if launch.rank == 0:
        store = TCPStore(
            "127.0.0.1", 0, launch.world_size, is_master=True, wait_for_workers=False, timeout=CONNECT_TIMEOUT
        )
        written = port_file.with_suffix(".tmp")
        written.write_text(str(store.port))
        os.replace(written, port_file)
        store.wait([f"connected/{rank}" for rank in range(1, launch.world_size)])
        port_file.unlink()
        return store
    deadline = time.monotonic() + CONNECT_TIMEOUT.total_seconds()
    while not port_file.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"rank 0 did not publish its port in {port_file}")
        time.sleep(0.05)
    port = int(port_file.read_text())
    store = TCPStore("127.0.0.1", port, launch.world_size, timeout=CONNECT_TIMEOUT)
    store.set(f"connected/{launch.rank}", "1")
    return store


def _introduce(launch: Launch) -> list[Peer]:
    peers: list[Peer | None] = [None] * launch.world_size
    torch.distributed.all_gather_object(peers, Peer(launch.rank, socket.gethostname(), os.getpid()))
    return [peer for peer in peers if peer is not None]
