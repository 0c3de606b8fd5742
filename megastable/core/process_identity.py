"""Which process of which machine: told apart from every other, and whether it still runs."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ProcessIdentity:
    """Names a process so that no other is taken for it: ids are used again, and other machines have the same ones."""

    host: str
    process_id: int
    started_ticks: int
    """Clock ticks from the machine's start to the process's; unlike a date, no correction of the clock moves it."""
    id_space: str
    """Where the id means this process: the running kernel and the namespace of its ids. Empty where it is unknown."""

    @classmethod
    def current(cls) -> ProcessIdentity:
        """Return that of this process."""
        status = _status_of(os.getpid())
        if status is None:
            return cls(socket.gethostname(), os.getpid(), 0, "")
        return cls(socket.gethostname(), os.getpid(), status.started_ticks, _id_space())

    def is_running(self) -> bool | None:
        """Tell whether the process runs; None where that cannot be seen from here, as of one of another machine."""
        if not self.id_space or self.id_space != _id_space():
            return None
        try:
            os.kill(self.process_id, 0)  # sends nothing
        except ProcessLookupError:
            return False
        except PermissionError:
            pass  # another user's
        status = _status_of(self.process_id)
        if status is None:
            # It has just ended, or this machine hides the processes of other users from each other.
            return None
        return status.started_ticks == self.started_ticks and not status.has_ended


@dataclass(frozen=True)
class _Status:
    started_ticks: int
    has_ended: bool
    """A process that nobody has waited for yet is still listed."""


def _status_of(process_id: int) -> _Status | None:
    """Read a process's line in /proc, which Linux alone has; None where there is none."""
    try:
        line = Path(f"/proc/{process_id}/stat").read_bytes()
    except OSError:
        return None
    # The name before the last parenthesis may hold blanks. proc_pid_stat(5): state is field 3, starttime field 22.
    fields = line.rpartition(b")")[2].split()
    return _Status(started_ticks=int(fields[19]), has_ended=fields[0] in (b"Z", b"X"))


def _id_space() -> str:
    """Return the boot of the running kernel and the namespace of this process's ids; empty where it has none."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        # Of two containers on one machine, each has a process 1 of its own.
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""
