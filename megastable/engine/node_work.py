"""Work that the first process of every node does for the others, which wait for as long as it takes."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch.distributed
from torch._C._distributed_c10d import PrefixStore, Store

from megastable.core.errors import UserError, shown
from megastable.engine.process_group import Peer
from megastable.engine.progress import Progress

POLL_SECONDS = 0.05
REPORT_SECONDS = 30.0
DONE = "done"
FAILED = "failed"

Result = TypeVar("Result")


def first_on_each_node(rank: int, peers: list[Peer], progress: Progress, work: Callable[[], Result]) -> Result:
    """Call ``work`` on the first rank of every node, then on the others, and return what it returned here; collective.

    The first call of a node may take hours, such as the tokenising of a corpus, whose cache the others then find. They
    wait for a note in the store. Where a working rank is stopped or dead, ``hang_watch`` ends the run.

    Raises:
        UserError: on every rank, where ``work`` refused on one.
    """
    store = PrefixStore("first_on_each_node", torch.distributed.distributed_c10d._get_default_store())
    first_of_host: dict[str, Peer] = {}
    for peer in peers:
        first_of_host.setdefault(peer.host, peer)
    workers = list(first_of_host.values())
    if peers[rank] in workers:
        with progress.at_length("preparing the data"), _noting_end(store, rank):
            outcome = _outcome(work)
    _wait_for(store, rank, workers)
    if peers[rank] not in workers:
        with progress.at_length("opening the data"):
            outcome = _outcome(work)
    # All are here at the same time now. They leave together, too: the store ends with rank 0, on which others wait.
    refusals: list[str | None] = [None] * len(peers)
    torch.distributed.all_gather_object(refusals, str(outcome) if isinstance(outcome, UserError) else None)
    for peer, refusal in zip(peers, refusals, strict=True):
        if refusal is not None:
            raise UserError(refusal if peer.host == peers[0].host else f"on {peer.host}: {refusal}")
    assert not isinstance(outcome, UserError)
    return outcome


def _outcome(work: Callable[[], Result]) -> Result | UserError:
    """Return what ``work`` returns, or its refusal, which is raised once all ranks know of it."""
    try:
        return work()
    except UserError as error:
        return error


@contextlib.contextmanager
def _noting_end(store: Store, rank: int) -> Iterator[None]:
    """Note the end of this rank's work in the store, good or bad."""
    end = FAILED
    try:
        yield
        end = DONE
    finally:
        # A store that is gone has ended with its host; this rank finds that out in its next collective.
        with contextlib.suppress(torch.distributed.DistError):
            store.set(f"done/{rank}", end)


def _wait_for(store: Store, rank: int, workers: list[Peer]) -> None:
    """Wait until all workers are done; rank 0 reports for whom it waits.

    Raises:
        RuntimeError: the work of one has failed, with another error than a refusal.
    """
    started = time.monotonic()
    next_report = started + REPORT_SECONDS
    for worker in workers:
        while not store.check([f"done/{worker.rank}"]):
            time.sleep(POLL_SECONDS)
            now = time.monotonic()
            if rank == 0 and now > next_report:
                next_report = now + REPORT_SECONDS
                seconds = now - started
                waits_for = f"the data on {shown(worker.host)} (rank {worker.rank}), {seconds:.0f} s so far"
                print(f"[megastable] waits for {waits_for}", file=sys.stderr, flush=True)
        # Its other processes would otherwise do the same work again, which may take hours.
        if store.get(f"done/{worker.rank}") == FAILED.encode():
            raise RuntimeError(f"rank {worker.rank} on {worker.host} failed while it prepared the data")
