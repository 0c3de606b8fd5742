"""A lock that is a file: it holds for all hosts that share its folder, and ends with the process that made it.

No lock of the operating system serves here. How a cluster mounts NFS or Lustre decides whether ``flock`` and ``fcntl``
hold for other hosts, for this one alone, or are unsupported; and a child that outlives a killed run keeps an ``flock``.
What every file system does in one place for all hosts is to create a name that is not there, and to rename.

- The lock is a file with a record of its holder. It is free where there is none: creating it takes it.
- The record of a holder that is over is replaced. Two that come at once must not both do so: a record is replaced or
  removed by the holder of the *claim* on it alone, which is a lock of the same kind named after the record, and only
  after a second look, whether the record is still there. One who dies with a claim is succeeded by the same rules.
- On the holder's machine its process id tells whether it is over. On another it is over where it shows no life, which
  is the time of its file, for ``STALE_SECONDS``. That is watched and not computed: the clocks of hosts differ.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from uuid import uuid4

from pydantic import Field, ValidationError

from megastable.config.section import Section
from megastable.core.errors import shown
from megastable.core.process_identity import ProcessIdentity

BEAT_SECONDS = 5.0
"""Between two signs of life of a holder."""
STALE_SECONDS = 120.0
"""A process that loads torch from a slow file system, or whose file server restarts, shows no life for a while."""
POLL_SECONDS = 1.0
MOST_BYTES = 2**16
"""A record has about 500; a longer file is none."""
MOST_COMMAND_CHARACTERS = 4000


class HeldError(Exception):
    """Another process holds the lock, or is just taking it."""

    def __init__(self, holder: Holder | None) -> None:
        self.holder = holder
        """None where its record cannot be read."""
        super().__init__()


class Holder(Section):
    """The record of the process that holds a lock, as JSON."""

    host: str
    process_id: int = Field(gt=0, lt=2**31)
    started_ticks: int
    id_space: str
    since: str
    command: str
    token: str
    """No two records are alike."""
    ended: str | None = None
    """The time at which the lock was released; None while it is held."""

    @classmethod
    def current(cls) -> Holder:
        """Make the record of this process, which holds the lock from now on."""
        identity = ProcessIdentity.current()
        # An argument may hold bytes that are no text, which JSON does not take.
        command = shown(shlex.join(sys.argv))[:MOST_COMMAND_CHARACTERS]
        return cls(**vars(identity), since=now(), command=command, token=uuid4().hex)

    @classmethod
    def read(cls, content: bytes) -> Holder | None:
        """Read a record; None where it is none, such as one that is just being written."""
        try:
            return cls.model_validate_json(content)
        except ValidationError:
            return None

    def is_over(self) -> bool | None:
        """Tell whether the lock is free; None where that cannot be seen from here."""
        if self.ended is not None:
            return True
        identity = ProcessIdentity(self.host, self.process_id, self.started_ticks, self.id_space)
        is_running = identity.is_running()
        return None if is_running is None else not is_running

    def to_bytes(self) -> bytes:
        """Return the content of the file."""
        return f"{self.model_dump_json(indent=2)}\n".encode()

    def __str__(self) -> str:
        return f"process {self.process_id} on {self.host}, since {self.since}: {self.command}"


def now() -> str:
    """Return the time of day here, with its offset from UTC."""
    return datetime.now().astimezone().isoformat(timespec="seconds")


@dataclass(frozen=True)
class Seen:
    """A lock's file at one moment."""

    content: bytes
    touched_ns: int


def look_at(path: Path) -> Seen | None:
    """Read the file of a lock; None where it is free.

    Raises:
        OSError: it cannot be read.
    """
    try:
        # Opened anew at every look: NFS asks its server then, and answers from a cache otherwise.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return Seen(os.read(descriptor, MOST_BYTES), os.fstat(descriptor).st_mtime_ns)
    finally:
        os.close(descriptor)


def acquire(path: Path, content: bytes, note_wait: Callable[[Holder | None], None]) -> bytes | None:
    """Take the lock with the record ``content``; returns the record that it succeeds, or None.

    Args:
        note_wait: called before a holder is watched for ``STALE_SECONDS`` that cannot be seen from here.

    Raises:
        HeldError: another process holds the lock.
        OSError: the file cannot be created or read, such as where its folder is gone.
    """
    while not create(path, content):
        seen = look_at(path)
        if seen is None:
            continue  # released between the two
        if seen.content == content:
            return None  # a rename that NFS has done and reported as failed
        _wait_until_over(path, seen, note_wait)
        claim = claim_on(path, seen.content)
        acquire(claim, content, note_wait)
        if _replace(path, seen.content, claim):
            return seen.content
    return None


def release(path: Path, content: bytes, left: bytes | None) -> None:
    """Give the lock back, as far as it is still held with the record ``content``.

    Args:
        left: the record that stays, of a holder that is over; None for no file.

    Raises:
        OSError: the folder is gone or cannot be written.
    """
    claim = claim_on(path, content)
    # Somebody else who has claimed the record takes this process for dead. Then it is theirs.
    if not create(claim, content if left is None else left):
        return
    if left is not None:
        _replace(path, content, claim)
        return
    seen = look_at(path)
    if seen is not None and seen.content == content:
        path.unlink()
    claim.unlink()


def show_life(path: Path, content: bytes) -> None:
    """Set the time of the lock's file to now, if it still has the record ``content``.

    Raises:
        OSError: it is gone or cannot be reached.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if os.read(descriptor, MOST_BYTES) == content:
            os.utime(descriptor)
    finally:
        os.close(descriptor)


def create(path: Path, content: bytes) -> bool:
    """Create the file of a lock; False where there is one.

    Raises:
        OSError: it cannot be written; nothing is left of it.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:
        return False
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(descriptor)
    except OSError:
        path.unlink(missing_ok=True)
        raise
    return True


def claim_on(path: Path, content: bytes) -> Path:
    """Return the file of the lock under which the record ``content`` of another lock may be replaced."""
    return path.with_name(f"{path.name}.{hashlib.sha256(content).hexdigest()[:16]}")


def _replace(path: Path, content: bytes, claim: Path) -> bool:
    """Put the file ``claim``, which this process holds, in the place of the record ``content``; False if it is gone."""
    # It was read before the claim was taken. Whoever had the claim in between has replaced or removed it.
    seen = look_at(path)
    if seen is None or seen.content != content:
        claim.unlink()
        return False
    os.replace(claim, path)
    return True


def _wait_until_over(path: Path, seen: Seen, note_wait: Callable[[Holder | None], None]) -> None:
    """Return once the holder whose record was seen is over, or another record is in its place.

    Raises:
        HeldError: it is alive.
    """
    holder = Holder.read(seen.content)
    # Looks are counted, not seconds: while a file server does not answer its holder cannot show life.
    for num_looks in range(round(STALE_SECONDS / POLL_SECONDS)):
        is_over = None if holder is None else holder.is_over()
        if is_over:
            return
        if is_over is False:
            raise HeldError(holder)
        if num_looks == 1:
            note_wait(holder)
        time.sleep(POLL_SECONDS)
        current = look_at(path)
        if current is None or current.content != seen.content:
            return
        if current.touched_ns != seen.touched_ns:
            raise HeldError(holder)
