"""Writes what may not get through: to a full disk, a pipe whose reader has left, a terminal that was closed.

A run of days must not end because a line could not be written. Lines that fail are kept, within a bound, and written
once the target takes them again.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megastable.core.errors import shown

KEPT_BYTES = 16 * 2**20
"""Most bytes that are kept for a target that cannot be written: hours of metrics of a large model."""


class LastingWriter:
    """Writes chunks of bytes in their order, and keeps those that fail for the next call.

    Args:
        name: the target, for messages.
        open_target: returns a file descriptor; called here, and again after every failure.
        report: takes a line for the user at the first failure, and one when writing works again.

    Raises:
        OSError: the target cannot be opened; only here.
    """

    def __init__(
        self, name: str, open_target: Callable[[], int], report: Callable[[str], None], kept_bytes: int = KEPT_BYTES
    ) -> None:
        self._name = name
        self._open = open_target
        self._report = report
        self._kept_bytes = kept_bytes
        self._descriptor: int | None = open_target()
        self._kept: deque[bytes] = deque()
        self._first_is_begun = False
        self._num_dropped = 0
        self._is_failing = False

    def write(self, chunk: bytes) -> None:
        """Write what was kept and then ``chunk``, as far as the target takes it."""
        self._kept.append(chunk)
        self._drop_oldest()
        try:
            self._write_kept()
        except OSError as error:
            self._close_descriptor()
            if not self._is_failing:
                self._report(f"{self._name} cannot be written ({error.strerror}); the run goes on and keeps its lines")
            self._is_failing = True
            return
        if self._is_failing:
            lost = f", but {self._num_dropped} of its lines are lost" if self._num_dropped else ""
            self._report(f"{self._name} can be written again{lost}")
            self._num_dropped = 0
        self._is_failing = False

    def close(self) -> None:
        """Try once more to write what was kept, and report how much is lost."""
        if self._kept:
            self.write(b"")
        num_lost = self._num_dropped + sum(chunk != b"" for chunk in self._kept)
        if num_lost:
            self._report(f"{num_lost} lines of {self._name} were never written")
        self._close_descriptor()

    def drop_kept(self) -> None:
        """Forget what was kept: the target is not ours to write any more."""
        self._kept.clear()
        self._num_dropped = 0

    def reopen(self) -> None:
        """Let the next call open the target anew."""
        self._close_descriptor()

    def _write_kept(self) -> None:
        if self._descriptor is None:
            # Opened anew, since the old descriptor may be stale, as after the restart of a file server.
            self._descriptor = self._open()
        while self._kept:
            num_written = os.write(self._descriptor, self._kept[0])
            rest = self._kept[0][num_written:]  # a disk that fills up takes a part
            self._first_is_begun = bool(rest)
            if rest:
                self._kept[0] = rest
            else:
                self._kept.popleft()

    def _drop_oldest(self) -> None:
        """Drop what is beyond the bound, but for the rest of a line whose beginning is written."""
        size = sum(map(len, self._kept)) if self._is_failing else 0
        begun = int(self._first_is_begun)
        while size > self._kept_bytes and len(self._kept) > begun + 1:
            size -= len(self._kept[begun])
            del self._kept[begun]
            self._num_dropped += 1

    def _close_descriptor(self) -> None:
        if self._descriptor is not None:
            # A file server may report only here that it never stored the last write.
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
        self._descriptor = None


class LastingFile(LastingWriter):
    """Appends to a file.

    Raises:
        OSError: the file cannot be opened; only here.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        super().__init__(str(path), self._open_file, report_on_stderr)

    def was_removed(self) -> bool:
        """Tell whether the path leads to another file than the one that was opened, or to none.

        Writing into a file that was removed meanwhile raises nothing: its lines are gone once it is closed.
        """
        if self._descriptor is None:
            return False  # the next line opens what is there by then
        try:
            return not os.path.samestat(os.stat(self.path), self._opened)
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:
            # A file server that does not answer may still have it.
            return False

    def _open_file(self) -> int:
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        self._opened = os.fstat(descriptor)
        return descriptor


def report_on_stderr(text: str) -> None:
    """Print a line on standard error, if that can still be written."""
    with contextlib.suppress(OSError):
        os.write(2, f"[megastable] {shown(text)}\n".encode(errors="backslashreplace"))


# Standard output and error


class _LastingStream(io.RawIOBase):
    """Is a standard stream whose writes never fail, below Python's layers of buffering and text."""

    def __init__(self, descriptor: int, name: str, report: Callable[[str], None]) -> None:
        self._descriptor = descriptor
        # Duplicated, since the writer closes its descriptor, while the number of the stream has to stay taken.
        self._writer = LastingWriter(name, lambda: os.dup(descriptor), report)

    def writable(self) -> bool:
        """Return True."""
        return True

    def fileno(self) -> int:
        """Return the descriptor of the stream."""
        return self._descriptor

    def isatty(self) -> bool:
        """Tell whether the stream is a terminal."""
        return os.isatty(self._descriptor)

    def write(self, data: Any) -> int:
        """Write or keep ``data``."""
        self._writer.write(bytes(data))
        return len(data)


def protect_standard_streams() -> None:
    """Let whatever is printed from here on never raise, in this program as in the packages that it uses.

    A character that the output's encoding lacks is written as its escape. A stream that was closed takes lines into
    nothing. Streams that somebody has put in the place of Python's own stay as they are.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            # Otherwise the next file or socket would get this number, and what is printed would go into it.
            os.open(os.devnull, os.O_RDWR)
    reports: dict[str, Callable[[str], None]] = {"stdout": report_on_stderr, "stderr": lambda text: None}
    for descriptor, (name, report) in enumerate(reports.items(), start=1):
        stream = getattr(sys, name)
        if stream is not getattr(sys, f"__{name}__"):
            continue
        encoding = "utf-8"
        if stream is not None:
            encoding = stream.encoding
            with contextlib.suppress(OSError):
                stream.flush()
        raw = _LastingStream(descriptor, "standard output" if descriptor == 1 else "standard error", report)
        text = io.TextIOWrapper(io.BufferedWriter(raw), encoding, errors="backslashreplace", line_buffering=True)
        setattr(sys, name, text)
