"""What a rank says when it cannot go on: who it is, and which peer is gone."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import NoReturn

import torch.distributed

from megastable.core.errors import UserError
from megastable.core.layout import ParallelLayout
from megastable.engine.process_group import Peer, missing_peers

EXIT_CODE_FAILURE = 1
PEER_DEATH_SHOWS_WITHIN_SECONDS = 1.0


@contextlib.contextmanager
def reporting_failures(rank: int, layout: ParallelLayout, peers: list[Peer]) -> Iterator[None]:
    """Turn an error, or a launcher's SIGTERM after a peer has died, into a message and an end of this process.

    A user's mistake passes through: all ranks meet it together.
    """
    _speak_before_sigterm(rank, layout, peers)
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        _end(_failure(error, rank, layout, peers))


def _failure(error: Exception, rank: int, layout: ParallelLayout, peers: list[Peer]) -> str:
    """Where a peer is gone, its loss is the news and the broken connection here only its echo."""
    deadline = time.monotonic() + PEER_DEATH_SHOWS_WITHIN_SECONDS
    while time.monotonic() < deadline:
        if gone := missing_peers(peers):
            return _loss(gone, rank, layout)
        if not isinstance(error, torch.distributed.DistError):
            break  # an error of this rank's own
        time.sleep(0.02)
    trace = "".join(traceback.format_exception(error))
    what = "lost its peers, perhaps on another node" if isinstance(error, torch.distributed.DistError) else "failed"
    return f"{trace}[megastable] {layout.describe(rank)} {what}: {type(error).__name__}: {error}"


def _loss(gone: list[Peer], rank: int, layout: ParallelLayout) -> str:
    names = ", ".join(f"{layout.describe(peer.rank)}, process {peer.process_id} on {peer.host}" for peer in gone)
    return f"[megastable] {names} is gone; {layout.describe(rank)} stops"


def _speak_before_sigterm(rank: int, layout: ParallelLayout, peers: list[Peer]) -> None:
    """A launcher that sees a rank die ends the others, perhaps before they have felt it; let them name it first.

    A thread waits for the signal, since the main thread may hang in a collective, where Python handlers do not run.
    """
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)

    def wait_for_signal() -> None:
        while os.read(read_end, 1)[0] != signal.SIGTERM:
            pass
        gone = missing_peers(peers)
        _end(_loss(gone, rank, layout) if gone else f"[megastable] {layout.describe(rank)} was told to stop")

    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    threading.Thread(target=wait_for_signal, daemon=True).start()


def _end(message: str) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.write(message + "\n")
    sys.stderr.flush()
    # An ordinary exit would wait for communication threads whose peers do not answer any more.
    os._exit(EXIT_CODE_FAILURE)
