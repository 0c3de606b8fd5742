"""What a rank says when it cannot go on: who it is, and which peer is gone."""

from __future__ import annotations

import os
import sys
import time
import traceback
from typing import NoReturn

from megastable.core.layout import ParallelLayout
from megastable.engine.process_group import Peer, missing_peers

EXIT_CODE_FAILURE = 1
PEER_DEATH_SHOWS_WITHIN_SECONDS = 1.0


def report_and_exit(error: BaseException, rank: int, layout: ParallelLayout, peers: list[Peer]) -> NoReturn:
    """Name the rank that failed and end this process at once, so that the launcher ends the others.

    Where a peer is gone, its loss is the news and the broken connection here only its echo.
    """
    gone = _wait_for_missing_peers(peers)
    if gone:
        names = ", ".join(f"{layout.describe(peer.rank)}, process {peer.process_id} on {peer.host}" for peer in gone)
        message = f"[megastable] {names} is gone; {layout.describe(rank)} stops ({type(error).__name__})\n"
    else:
        trace = "".join(traceback.format_exception(error))
        message = f"{trace}[megastable] {layout.describe(rank)} failed: {type(error).__name__}: {error}\n"
    sys.stdout.flush()
    sys.stderr.write(message)
    sys.stderr.flush()
    # An ordinary exit would wait for communication threads whose peers do not answer any more.
    os._exit(EXIT_CODE_FAILURE)


def _wait_for_missing_peers(peers: list[Peer]) -> list[Peer]:
    deadline = time.monotonic() + PEER_DEATH_SHOWS_WITHIN_SECONDS
    while time.monotonic() < deadline:
        if gone := missing_peers(peers):
            return gone
        time.sleep(0.05)
    return []
