"""Folders that several processes need and one of them builds."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import BaseFileLock, FileLock, Timeout

from megastable.core.errors import UserError
from megastable.data.progress import note

REPORT_SECONDS = 30.0
"""Between two lines of a process that waits."""


def build_once(
    target: Path,
    build: Callable[[Path], None],
    describe: Callable[[Path], str] = lambda unfinished: "",
    *,
    show_progress: bool,
) -> None:
    """Make sure that the folder ``target`` exists: build it here, or wait for the process that is building it.

    ``build`` gets a folder beside the target, which is renamed when all is written. So the target is whole or absent,
    whatever happens to the builder. The folder is empty, or has what a build of the same target left when it was
    interrupted or had an error, so that ``build`` can go on from there. The lock is the operating system's and ends
    with the process that holds it; then the next one in line builds. An error of ``build`` is raised here, and by
    every process that waited.

    Args:
        describe: says in a phrase how far an unfinished folder has come; empty where there is nothing to go on from,
            or it cannot tell.

    Raises:
        UserError: the cache folder cannot be written.
    """
    if target.is_dir():
        return
    lock = _take_lock(target, describe, show_progress=show_progress)
    try:
        # Asked again: the process that held the lock before may have built it.
        if not target.is_dir():
            _build_beside(target, build, describe)
    finally:
        lock.release()


def _take_lock(target: Path, describe: Callable[[Path], str], *, show_progress: bool) -> BaseFileLock:
    """Wait until no other process builds ``target``, saying so every now and then, and hold its lock."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(f"{target}.lock")
        # Tried first without waiting, to tell the user what a long wait is for.
        try:
            lock.acquire(timeout=0)
        except Timeout:
            note("Waiting for another process that is preparing the same corpus ...", show=show_progress)
            while not lock.is_locked:
                try:
                    lock.acquire(timeout=REPORT_SECONDS)
                except Timeout:
                    progress = describe(_unfinished(target))
                    note(f"Still waiting for it{progress and f': {progress}'}", show=show_progress)
    except OSError as error:
        raise _cannot_be_written(target, error) from error
    return lock


def _unfinished(target: Path) -> Path:
    return target.with_name(f"{target.name}.building")


def _cannot_be_written(target: Path, error: OSError) -> UserError:
    return UserError(
        f"megastable.data.cache_dir: {target.parent} cannot be written ({error.strerror}); name a folder that can"
    )


def _build_beside(target: Path, build: Callable[[Path], None], describe: Callable[[Path], str]) -> None:
    """Build into a folder beside ``target`` and rename it; the caller holds the lock."""
    unfinished = _unfinished(target)
    try:
        # What is there was left by a builder that was killed or had an error. It no longer runs: its lock is free.
        unfinished.mkdir(exist_ok=True)
        build(unfinished)
        os.rename(unfinished, target)
    except UserError:
        # Such as a document that cannot be read, be it for once. What is tokenised of hours is gone on from.
        if not describe(unfinished):
            shutil.rmtree(unfinished, ignore_errors=True)
        raise
    except OSError as error:
        # Such as a full disk, after which the next start goes on.
        raise _cannot_be_written(target, error) from error
