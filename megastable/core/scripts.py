"""The streams and the command line of every script: whatever they are, it ends with its answer's exit code."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn, TextIO

from megastable.core.errors import UserError, shown


class OutputError(UserError):
    """What a script prints cannot be written, such as on a full disk."""


def run_script(main: Callable[[], int | None]) -> NoReturn:
    """Run the main function of a script, and exit with the code that it returns, 0 for None.

    A user's mistake ends with one message and exit code 2, and so does output that cannot be written.
    """
    prepare_output()
    code: int | str | None
    try:
        code = main()
    except SystemExit as end:  # also after --help and options that are refused
        code = end.code
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        code = error.exit_code
    sys.exit(finish_output() or code)


class Parser(argparse.ArgumentParser):
    """Parses a command line; what it refuses is shown, and not obeyed by the terminal."""

    def error(self, message: str) -> NoReturn:
        """Print usage and mistake, and exit with code 2."""
        super().error(shown(message, keep="\n"))


def parse_arguments(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line; streams that cannot take the help do not change how it ends.

    The streams themselves are afterwards what they were, for a program that has its own care of them.
    """
    streams = sys.stdout, sys.stderr
    prepare_output()
    try:
        return parser.parse_args()
    except SystemExit as end:
        sys.exit(finish_output() or end.code)
    except OutputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    finally:
        sys.stdout, sys.stderr = streams


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
        # It looks where it stands, which a file that became a pipe does not know; characters are then as they were.
        with contextlib.suppress(OSError):
            stream.reconfigure(errors=errors)
    return ForgivingStream(stream)


def finish_output() -> int:
    """Send what is buffered; return the exit code: 0, or 2 where it cannot be written, which is reported."""
    try:
        sys.stdout.flush()
    except OutputError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


class ForgivingStream:
    """Writes to a stream until its reader leaves; from then on, what is written is lost without an error.

    Everything else, such as a full disk, is an ``OutputError`` once, and what follows is lost. All other attributes are
    those of the stream.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write, and return the number of characters."""
        try:
            return self._stream.write(text)
        except OSError as error:
            self._lead_nowhere(error)
            return len(text)

    def flush(self) -> None:
        """Send what is buffered."""
        try:
            self._stream.flush()
        except OSError as error:
            self._lead_nowhere(error)

    def _lead_nowhere(self, error: OSError) -> None:
        """Drop what is buffered and what comes: Python flushes when it ends, and would fail there once more."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)
        if not isinstance(error, BrokenPipeError):
            raise OutputError(f"the output cannot be written: {error.strerror}") from error
