"""Which processes have started this one as a rank of a launch, and whether they still live.

A launcher that is killed leaves its ranks running, on GPUs that nobody looks after any more. ``deepspeed`` consists of
two processes, of which the outer one ends at once where it is told to, without a word to the inner one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from megastable.core.launch_variables import in_srun_step, sets_rank
from megastable.engine.hostfile import NODE_LAUNCHER, runs_here_alone
from megastable.engine.rendezvous import launcher_of

SHELLS = frozenset({"ash", "bash", "busybox", "csh", "dash", "fish", "ksh", "sh", "tcsh", "zsh"})
"""What starts a process is no launcher where it is a shell: with ``nohup`` a run has to outlive its shell."""
VARIABLES_OF_LASTING_LAUNCHERS = ("TORCHELASTIC_RUN_ID", "CROSS_SIZE")
"""Of torchrun and ``deepspeed``, which stay until their ranks have ended."""


class LauncherWatch:
    """Knows the processes without which this one is no part of a launch any more.

    Args:
        processes: all of them, nearest first; none for a run that was started by hand.
        loss: names one that had ended before it could be looked at.
    """

    def __init__(self, processes: Sequence[psutil.Process] = (), loss: str | None = None) -> None:
        self._names = {process: _described(process) for process in processes}
        self._loss = loss

    @classmethod
    def of(cls, process: psutil.Process, environment: Mapping[str, str]) -> LauncherWatch:
        """Find the launcher of a process with this environment.

        It is the nearest ancestor that is not of one rank alone. Watched are those between, too, such as a wrapper that
        is a rank to its launcher, and the outer process of ``deepspeed``.
        """
        parents = process.parents()
        if not parents or not (sets_rank(environment) or in_srun_step(environment)):
            return cls()
        try:
            launcher = launcher_of(process)
            if _adopts(launcher) and any(name in environment for name in VARIABLES_OF_LASTING_LAUNCHERS):
                return cls(loss="it had ended before")
            if _is_shell(launcher):
                return cls()
            watched = parents[: parents.index(launcher) + 1]
            words = _words(launcher)
            outer = launcher.parent()
            if NODE_LAUNCHER in words and outer is not None:
                if runs_here_alone(words) and _adopts(outer):
                    return cls(loss="its outer process had ended before")
                if not _is_shell(outer) and not _adopts(outer):
                    watched.append(outer)
            return cls(watched)
        except psutil.NoSuchProcess as error:
            return cls(loss=f"process {error.pid} has just ended")

    def loss(self) -> str | None:
        """Say which process of the launcher has ended; None while all live."""
        if self._loss is None:
            self._loss = next(
                (f"{name} has ended" for process, name in self._names.items() if has_ended(process)), None
            )
        return self._loss


def launch_created(process: psutil.Process, environment: Mapping[str, str]) -> float:
    """Return when the launch of a process began, in seconds since the epoch.

    That is when the process itself was created, but when torchrun was where it has started its ranks anew.
    """
    if environment.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" and process.parents():
        return float(launcher_of(process).create_time())
    return float(process.create_time())


def has_ended(process: psutil.Process) -> bool:
    """Tell whether a process has ended, also where nobody has waited for it yet."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
    except psutil.Error:  # of another user, on a machine that shows nothing of those
        return False


def _adopts(process: psutil.Process) -> bool:
    """Tell whether a process is one to which the system gives those whose parents have ended."""
    # In a container a launcher may be the first process itself.
    return (process.pid == 1 and not _runs_python(process)) or process.name() == "systemd"


def _is_shell(process: psutil.Process) -> bool:
    return process.name().lstrip("-") in SHELLS


def _runs_python(process: psutil.Process) -> bool:
    try:
        return Path(process.exe()).name.startswith("python")
    except psutil.AccessDenied:
        return False


def _words(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.AccessDenied:
        return []


def _described(process: psutil.Process) -> str:
    try:
        return f"process {process.pid} ({process.name()})"
    except psutil.Error:
        return f"process {process.pid}"
