"""Folders that several processes need and one of them builds."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import BaseFileLock, FileLock, Timeout

from megastable.core.errors import UserError
from megastable.data.progress import note


def build_once(target: Path, build: Callable[[Path], None], *, show_progress: bool) -> None:
    """Make sure that the folder ``target`` exists: build it here, or wait for the process that is building it.

    ``build`` gets an empty folder beside the target, which is renamed when all is written. So the target is whole or
    absent, whatever happens to the builder. The lock is the operating system's and ends with the process that holds
    it; then the next one in line builds. An error of ``build`` is raised here, and by every process that waited.

    Raises:
        UserError: the cache folder cannot be written.
    """
    if target.is_dir():
        return
    lock = _take_lock(target, show_progress=show_progress)
    try:
        # Asked again: the process that held the lock before may have built it.
        if not target.is_dir():
            _build_beside(target, build)
    finally:
        lock.release()


def _take_lock(target: Path, *, show_progress: bool) -> BaseFileLock:
    """Wait until no other process builds ``target``, and hold its lock."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(f"{target}.lock")
        # Tried first without waiting, to tell the user what a long wait is for.
        try:
            lock.acquire(timeout=0)
        except Timeout:
            note("Waiting for another process that is preparing the same corpus ...", show=show_progress)
            lock.acquire()
    except OSError as error:
        raise UserError(
            f"megastable.data.cache_dir: {target.parent} cannot be written ({error.strerror}); name a folder that can"
        ) from error
    return lock


def _build_beside(target: Path, build: Callable[[Path], None]) -> None:
    """Build into a folder beside ``target`` and rename it; the caller holds the lock."""
    unfinished = target.with_name(f"{target.name}.building")
    # What is there was left by a builder that was killed. It no longer runs, since its lock is free.
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    try:
        build(unfinished)
    except BaseException:
        # An interrupt, too, leaves nothing half built.
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    os.rename(unfinished, target)
