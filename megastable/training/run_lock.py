"""Locks a run folder for the run that writes it, so that no other run writes there at the same time."""

from __future__ import annotations

import contextlib
import enum
import threading
from functools import partial
from pathlib import Path
from types import TracebackType

from megastable.core.errors import RunFolderError
from megastable.core.run_paths import RunPaths
from megastable.training.lock_file import (
    BEAT_SECONDS,
    STALE_SECONDS,
    HeldError,
    Holder,
    acquire,
    create,
    look_at,
    now,
    release,
    show_life,
)
from megastable.training.output import report_on_stderr

ATTEMPTS = 10
"""To make a folder that others remove at the same time, as a start does that is refused."""


class Standing(enum.Enum):
    """Says how a lock stands that was taken before."""

    HELD = "held"
    REMOVED = "removed"
    """Its file is gone, and perhaps the folder with it. Nobody else holds the lock."""
    TAKEN = "taken"
    """Another process holds it, or has held it since."""


class RunLock:
    """Holds the lock of a run folder in the process of rank 0; the other ranks write when rank 0 leads them."""

    def __init__(self, paths: RunPaths, holder: Holder, previous: bytes | None, made: list[Path]) -> None:
        self.path = paths.lock
        self._paths = paths
        self._holder = holder
        self._content = holder.to_bytes()
        self._previous = previous
        self._made = made
        self._has_begun = False
        self._released = threading.Event()

    @classmethod
    def take(cls, paths: RunPaths) -> RunLock:
        """Lock the folder, which is made where it is missing, and show life from another thread until the release.

        Raises:
            RunFolderError: another run holds the lock, or the folder cannot be written.
        """
        holder = Holder.current()
        made: list[Path] = []
        try:
            previous = _acquire_in_folder(paths, holder.to_bytes(), made)
        except HeldError as error:
            raise _in_use(paths, error.holder) from error
        except OSError as error:
            _remove_folders(made)
            raise RunFolderError(f"--run-dir: {paths.path} cannot be locked ({error.strerror})") from error
        lock = cls(paths, holder, previous, made)
        threading.Thread(target=lock._show_life, daemon=True).start()
        return lock

    def begin_writing(self) -> str | None:
        """Note that the run writes from here on, so that the lock's file stays and names it as the last one.

        Returns:
            Why it must not write: another run has taken the folder over meanwhile. Else None.
        """
        self._has_begun = True
        with contextlib.suppress(OSError):  # a folder that cannot be written shows with the first file
            if self.keep() is Standing.TAKEN:
                return self.describe_loss()
        return None

    def standing(self) -> Standing:
        """Look whether this process still holds the lock."""
        try:
            seen = look_at(self.path)
        except OSError:
            # A file server that does not answer is not another run.
            return Standing.HELD
        if seen is None:
            return Standing.REMOVED
        return Standing.HELD if seen.content == self._content else Standing.TAKEN

    def keep(self) -> Standing:
        """Look how the lock stands, and take it again where it was removed, with the folder if that is gone, too.

        Raises:
            OSError: it was removed and cannot be made again.
        """
        standing = self.standing()
        if standing is not Standing.REMOVED:
            return standing
        self._paths.path.mkdir(parents=True, exist_ok=True)
        was_faster = create(self.path, self._content)
        return Standing.REMOVED if was_faster else Standing.TAKEN

    def loss(self) -> str | None:
        """Say which run has taken the folder over; None while none has. From any thread."""
        return self.describe_loss() if self.standing() is Standing.TAKEN else None

    def describe_loss(self) -> str:
        """Say which run has taken the folder over, for the message with which this one stops."""
        seen = None
        with contextlib.suppress(OSError):
            seen = look_at(self.path)
        holder = None if seen is None else Holder.read(seen.content)
        return (
            f"{self.path.parent} was taken over by another run, {_named(holder)}. This one showed no life for "
            f"{STALE_SECONDS:.0f} s, or its lock was removed; it stops and leaves the folder as it is"
        )

    def release(self) -> None:
        """Give the lock back. A run that has written nothing leaves the folder as it found it."""
        if self._released.is_set():
            return
        self._released.set()
        left = self._previous
        if self._has_begun:
            left = self._holder.model_copy(update={"ended": now()}).to_bytes()
        # On a full disk the record stays as it is: of a process that has ended.
        with contextlib.suppress(OSError):
            release(self.path, self._content, left)
        if not self._has_begun:
            _remove_folders(self._made)

    def _show_life(self) -> None:
        while not self._released.wait(BEAT_SECONDS):
            with contextlib.suppress(OSError):
                show_life(self.path, self._content)

    def __enter__(self) -> RunLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def _acquire_in_folder(paths: RunPaths, content: bytes, made: list[Path]) -> bytes | None:
    """Make the folder and take its lock; returns the record that was there.

    Args:
        made: gets the folders that were missing, deepest first.
    """
    for _ in range(ATTEMPTS):
        missing = [folder for folder in (paths.path, *paths.path.parents) if not folder.exists()]
        made += [folder for folder in missing if folder not in made]
        paths.path.mkdir(parents=True, exist_ok=True)
        try:
            return acquire(paths.lock, content, partial(_report_wait, paths))
        except FileNotFoundError as error:
            # Another start had made the folder, was refused and has removed it.
            lost = error
    raise lost


def _remove_folders(folders: list[Path]) -> None:
    """Remove folders that are empty, deepest first."""
    with contextlib.suppress(OSError):
        for folder in folders:
            folder.rmdir()


def _in_use(paths: RunPaths, holder: Holder | None) -> RunFolderError:
    return RunFolderError(
        f"{paths.path} is in use by another run: {_named(holder)}\n"
        "Wait for its end, or write to another folder with --run-dir PATH. In a copy of that run's folder, remove "
        f"{paths.lock.name}"
    )


def _report_wait(paths: RunPaths, holder: Holder | None) -> None:
    report_on_stderr(
        f"{paths.path} was not left in order by {_named(holder)}. Whether it still runs cannot be seen from here: "
        f"waits up to {STALE_SECONDS:.0f} s for a sign of life"
    )


def _named(holder: Holder | None) -> str:
    return "an unknown process" if holder is None else str(holder)
