"""The end of a process that cannot end in order, because one of its threads waits for what does not come."""

from __future__ import annotations

import os
import sys
import threading
from typing import NoReturn

from megastable.core.errors import shown

WRITE_SECONDS = 1.0
_ENDING = threading.Lock()
"""Held by the thread that ends this process; never released."""


def end_process(message: str, exit_code: int) -> NoReturn:
    """Write a message, unless it is empty, to standard error, and end this process whatever its threads wait for."""
    claim_end()
    if message:
        write_soon(message)
    # An ordinary exit would wait for communication threads whose peers do not answer any more.
    os._exit(exit_code)


def claim_end() -> None:
    """Make this thread the one that ends the process; another one waits in here until that has happened.

    What fails meanwhile is the echo of an end elsewhere, and would be reported as a failure of its own.
    """
    _ENDING.acquire()


def write_soon(message: str) -> None:
    """Write a message to standard error, unless that takes longer than a moment, as where a pipe is not read."""

    def write() -> None:
        sys.stdout.flush()
        sys.stderr.write(shown(message, keep="\n") + "\n")
        sys.stderr.flush()

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    writer.join(WRITE_SECONDS)
