"""The processes of a run: connecting them, leaving again, and what a rank reports when it cannot go on."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import socket
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import deepspeed
import psutil
import torch
import torch.distributed
from deepspeed.accelerator import get_accelerator
from torch._C._distributed_c10d import Store

from megastable.core.errors import EXIT_CODE_FAILURE, DamagedDataError, RunStoppedError, UserError
from megastable.core.host import cpu_mask, threads_per_process
from megastable.core.launch import Launch
from megastable.core.layout import ParallelLayout
from megastable.engine.host_memory import keep_freed_memory
from megastable.engine.launcher_watch import has_ended
from megastable.engine.process_end import end_process
from megastable.engine.rendezvous import CONNECT_TIMEOUT, listen_on_loopback, rendezvous
from megastable.engine.stop_request import StopRequest

COLLECTIVE_TIMEOUT = timedelta(days=1)
"""Longer than anything that a rank waits for in a healthy run: what hangs is the matter of ``hang_watch``, which knows
whether another rank goes on meanwhile. A limit of the collectives would not, and would name no rank."""
REFUSAL = "refusal"
"""Key of the store: why rank 0 refuses the run; empty where it does not."""
LEAVES = "leaves"
"""Key of the store, before a rank: it has met a mistake of the user and waits for nobody any more."""
OTHERS_LEAVE_WITHIN = timedelta(seconds=5)
PEER_DEATH_SHOWS_WITHIN_SECONDS = 1.0


@dataclass(frozen=True)
class Peer:
    """A process of this run, so that a report can name the one that has died."""

    rank: int
    host: str
    process_id: int
    cpus: frozenset[int]


@contextlib.contextmanager
def connected(launch: Launch) -> Iterator[list[Peer]]:
    """Join the process group of the run, and yield all its processes. gloo connects CPUs, NCCL NVIDIA GPUs.

    Raises:
        UserError: this node has fewer GPUs than processes, or another program has taken the port, or rank 0 refuses the
            run.
    """
    _prepare_device(launch)
    listen_on_loopback(launch)
    store = rendezvous(launch)
    _check_not_refused(store, launch.rank)
    # DeepSpeed compiles this extension for its inference all-reduce wherever it connects: a minute on a cold machine,
    # in a folder that two launches race for. Training does not use it.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    backend = "gloo" if get_accelerator().device_name() == "cpu" else get_accelerator().communication_backend_name()
    set_default_timeout(COLLECTIVE_TIMEOUT)
    # The group is made here and not by DeepSpeed, which would meet at the launcher's default port, where two runs on
    # one machine collide, and would ask for oneCCL where its bindings can be imported.
    torch.distributed.init_process_group(
        backend, store=store, rank=launch.rank, world_size=launch.world_size, timeout=CONNECT_TIMEOUT
    )
    deepspeed.init_distributed(backend, auto_mpi_discovery=False, verbose=False, timeout=COLLECTIVE_TIMEOUT)
    try:
        peers = _introduce(launch)
        # All have met. Until then nobody watches, and a rank that does not come is missed after the shorter time.
        torch.distributed.distributed_c10d._set_pg_timeout(COLLECTIVE_TIMEOUT)
        if get_accelerator().device_name() == "cpu":
            share_processors(peers, launch.rank)
        yield peers
    except UserError:  # all ranks leave together
        torch.distributed.destroy_process_group()
        raise
    torch.distributed.barrier()
    # Left to the interpreter's exit, a group was seen to abort the process. After a failure it is left alone: taking
    # down a group with transfers under way can wait for ever.
    torch.distributed.destroy_process_group()


def refuse_other_ranks(launch: Launch, refusal: str) -> None:
    """Meet the other ranks in the place of ``connected``, and let them end with a refusal that rank 0 alone found."""
    # Who does not come has ended for a reason of its own.
    with contextlib.suppress(UserError, torch.distributed.DistError):
        store = rendezvous(launch)
        store.set(REFUSAL, refusal)
        # The store may end with this process.
        store.wait([f"{REFUSAL}/{rank}" for rank in range(1, launch.world_size)], CONNECT_TIMEOUT)


def _check_not_refused(store: Store, rank: int) -> None:
    if rank == 0:
        store.set(REFUSAL, "")
        return
    refusal = store.get(REFUSAL).decode()
    if refusal:
        store.set(f"{REFUSAL}/{rank}", "read")
        raise UserError(refusal)


def set_default_timeout(timeout: timedelta) -> None:
    """Set the time that collectives wait in groups made from here on, in this process.

    Groups of some of the ranks do not inherit the timeout of the world group. Nobody hands them one, since DeepSpeed
    makes them; they read torch's defaults, which are 30 minutes, and 10 under NCCL.
    """
    c10d = torch.distributed.distributed_c10d
    for default in ("default_pg_timeout", "default_pg_nccl_timeout"):
        setattr(c10d, default, timeout)


def share_processors(peers: list[Peer], rank: int) -> None:
    """Give torch in this process its share of the processors, of which it would take all it may run on.

    Processes of this machine that may run on the same processors would fight for them. Those that a scheduler has bound
    to processors of their own share nothing.
    """
    own = peers[rank]
    sharing = [peer for peer in peers if peer.host == own.host and peer.cpus & own.cpus]
    torch.set_num_threads(threads_per_process(len(sharing), os.environ))


def check_equal_on_all_ranks(value: str, what: str) -> None:
    """Check that every rank has the same ``value``; collective.

    Raises:
        UserError: on every rank; the ranks that differ from rank 0 are named.
    """
    # Of a manifest of a large run, every rank would hold a copy from every other.
    digest = hashlib.blake2b(value.encode()).hexdigest()
    values: list[str] = [""] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, digest)
    different = [rank for rank, other in enumerate(values) if other != values[0]]
    if different:
        raise UserError(f"{what} is not the same on all ranks: {different} differ from rank 0")


def stop_together(reason: str | None) -> None:
    """End the run on all ranks where rank 0 has a reason; what the others pass does not matter. Collective.

    Raises:
        RunStoppedError: with the reason, on every rank.
    """
    # A number for every step; the text, which takes several times as long, only where there is one.
    has_reason = torch.tensor(float(reason is not None), device=get_accelerator().current_device_name())
    torch.distributed.broadcast(has_reason, src=0)
    if has_reason.item():
        reasons = [reason]
        torch.distributed.broadcast_object_list(reasons, src=0)
        raise RunStoppedError(str(reasons[0]))


def _prepare_device(launch: Launch) -> None:
    """Tell DeepSpeed which process this is, and give it its GPU, or let it keep its memory on a CPU."""
    # DeepSpeed reads these variables in many places. Under SLURM, or alone, nobody else has set them.
    os.environ["LOCAL_RANK"] = str(launch.local_rank)
    os.environ["RANK"] = str(launch.rank)
    os.environ["WORLD_SIZE"] = str(launch.world_size)
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        keep_freed_memory()
        return
    if accelerator.device_count() == 1 and "SLURM_PROCID" in os.environ:
        os.environ["LOCAL_RANK"] = "0"  # SLURM may show each task its own GPU alone, as its first
    elif launch.local_rank >= accelerator.device_count():
        raise UserError(
            f"{launch.local_world_size} processes were started on {socket.gethostname()}, "
            f"which has {accelerator.device_count()} GPU(s)"
        )
    accelerator.set_device(int(os.environ["LOCAL_RANK"]))


def _introduce(launch: Launch) -> list[Peer]:
    """Gather who is who, as long as all are there to say it; collective."""
    peers: list[Peer | None] = [None] * launch.world_size
    torch.distributed.all_gather_object(peers, Peer(launch.rank, socket.gethostname(), os.getpid(), cpu_mask()))
    return [peer for peer in peers if peer is not None]


# Failures


@contextlib.contextmanager
def reporting_failures(rank: int, layout: ParallelLayout, peers: list[Peer], stop: StopRequest) -> Iterator[None]:
    """Turn an error, or a launcher's signal after a peer has died, into a message and an end of this process.

    A user's mistake passes through: all ranks meet it together.
    """

    def loss() -> str | None:
        gone = _missing(peers)
        return _loss(gone, rank, layout) if gone else None

    others = [peer.process_id for peer in peers if peer.host == socket.gethostname() and peer.rank != rank]
    stop.watch_peers(loss, partial(_kill, [psutil.Process(other) for other in others]))
    try:
        yield
        _leave_together(stop)
    except RunStoppedError:
        _leave_together(stop)
        raise
    except UserError:
        # Rank 0 says it for all. The launcher ends the others for that, which is no loss that they should report.
        stop.leave(signal.SIG_DFL)
        _let_others_leave(rank, len(peers))
        raise
    except Exception as error:
        end_process(_failure(error, rank, layout, peers), EXIT_CODE_FAILURE)


def _leave_together(stop: StopRequest) -> None:
    """Let no rank of a run that has come to its end report that another has left before it; collective."""
    # A launcher may end all ranks once the first has left, although they are leaving already.
    stop.leave(signal.SIG_IGN)
    # No rank goes on before every rank ignores signals.
    torch.distributed.barrier()


def _let_others_leave(rank: int, world_size: int) -> None:
    """Tell rank 0 that a signal may end this rank now; rank 0, for whose end a launcher sends it, waits for all."""
    # Not a collective: an error that only some ranks have met would never end there.
    with contextlib.suppress(torch.distributed.DistError):
        store = torch.distributed.distributed_c10d._get_default_store()
        store.set(f"{LEAVES}/{rank}", "")
        if rank == 0:
            store.wait([f"{LEAVES}/{other}" for other in range(world_size)], OTHERS_LEAVE_WITHIN)


def _failure(error: Exception, rank: int, layout: ParallelLayout, peers: list[Peer]) -> str:
    """Describe the error; where a peer has died, that is reported, and the broken connection here is only its echo."""
    deadline = time.monotonic() + PEER_DEATH_SHOWS_WITHIN_SECONDS
    while time.monotonic() < deadline:
        gone = _missing(peers)
        if gone:
            return _loss(gone, rank, layout)
        # gloo raises a plain RuntimeError where a connection breaks, sometimes before its peer is seen to have ended.
        if not isinstance(error, RuntimeError):
            break  # an error of this rank's own
        time.sleep(0.02)
    # The place in the code says nothing about a damaged file.
    trace = "" if isinstance(error, DamagedDataError) else "".join(traceback.format_exception(error))
    what = "failed"
    if isinstance(error, torch.distributed.DistError):
        what = "lost its peers, perhaps on another node"
    return f"{trace}[megastable] {layout.describe(rank)} {what}: {type(error).__name__}: {error}"


def _loss(gone: list[Peer], rank: int, layout: ParallelLayout) -> str:
    names = ", ".join(f"{layout.describe(peer.rank)}, process {peer.process_id} on {peer.host}" for peer in gone)
    return f"[megastable] {names} is gone; {layout.describe(rank)} stops"


def _kill(processes: list[psutil.Process]) -> None:
    """Kill those that still run: a stopped process cannot end itself."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()


def _missing(peers: list[Peer]) -> list[Peer]:
    """List the processes of this machine that have ended; those of other machines cannot be seen from here."""
    return [peer for peer in peers if peer.host == socket.gethostname() and _is_gone(peer.process_id)]


def _is_gone(process_id: int) -> bool:
    try:
        return has_ended(psutil.Process(process_id))
    except psutil.NoSuchProcess:
        return True
