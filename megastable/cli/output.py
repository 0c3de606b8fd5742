"""Standard output and standard error of the command: whatever they are, a command ends with its answer's exit code."""

from __future__ import annotations

import os
import sys
from typing import Any, TextIO


def prepare_output() -> None:
    """Make both streams take every text, wherever they lead.

    A stream that was closed by the caller (``>&-``) swallows what is written. A pipe whose reader has left, such as
    ``head``, swallows the rest. Characters that the encoding lacks are replaced on standard output, where a drawing
    must keep its width, and escaped on standard error, where a path must stay readable.
    """
    sys.stdout = _prepared(sys.stdout, "replace")
    sys.stderr = _prepared(sys.stderr, "backslashreplace")


def _prepared(stream: TextIO | None, errors: str) -> Any:
    if stream is None:
        return open(os.devnull, "w", encoding="utf-8")
    # A stream that a caller from Python has put there takes any text as it is.
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(errors=errors)
    return ForgivingStream(stream)


def finish_output() -> int:
    """Send what is buffered; return the exit code: 0, or 2 where it cannot be written, which is reported."""
    try:
        sys.stdout.flush()
    except OSError as error:  # a full disk
        print(f"error: the output cannot be written: {error.strerror}", file=sys.stderr)
        if isinstance(sys.stdout, ForgivingStream):
            sys.stdout.lead_nowhere()
        return 2
    return 0


class ForgivingStream:
    """Writes to a stream until its reader leaves; from then on, what is written is lost without an error.

    Everything else, such as a full disk, is an error as ever. All other attributes are those of the stream.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write, and return the number of characters."""
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            self.lead_nowhere()
            return len(text)

    def flush(self) -> None:
        """Send what is buffered."""
        try:
            self._stream.flush()
        except BrokenPipeError:
            self.lead_nowhere()

    def lead_nowhere(self) -> None:
        """Drop what is buffered and what comes: Python flushes when it ends, and would fail there once more."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)
