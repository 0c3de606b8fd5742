"""Whether a rank has been asked to stop, by a signal or because its launcher has ended, and what becomes of that.

Before its first step a run has nothing to save, and the process ends at once. From then on a request is a flag, which
the ranks tell each other in the sum of every step; they save and leave together. A second signal ends the process at
once. All of this is done by a thread: the main one may hang in a collective, where Python's handlers do not run.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator

import psutil
import torch.distributed
from deepspeed.accelerator import get_accelerator

from megastable.core.errors import EXIT_CODE_ASKED_NOT_SAVED, EXIT_CODE_FAILURE
from megastable.engine.launcher_watch import LauncherWatch, launch_created
from megastable.engine.process_end import end_process, write_soon

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""Of launchers and schedulers, Ctrl-C, a terminal that is closed, SLURM's --signal=USR1."""
ECHO_SECONDS = 0.5
"""Launchers pass on to their ranks what has reached these from the terminal already."""
SECOND_SIGNAL_SECONDS = 10.0
LOOK_SECONDS = 1.0
"""Between two looks at the launcher and the peers."""
ORPHAN_SECONDS = 120.0
"""Without its launcher nobody ends a run that hangs: it has so long for its step and a save."""
EXIT_CODE_OF_SIGNAL = 128
"""What shells add to the number of the signal that has ended a program."""


def is_second_signal(seconds_since_first: float) -> bool:
    """Tell whether a signal insists on an earlier one, rather than being its echo or one of its own."""
    return ECHO_SECONDS <= seconds_since_first <= SECOND_SIGNAL_SECONDS


class StopRequest:
    """Remembers by what this rank has been asked to stop, and ends its process where that cannot wait.

    Args:
        time_limit_seconds: of the whole run, for what comes before its first step; None for no limit.
        seconds_so_far: how long ago the launch began.

    Attributes:
        reason: what happened to this rank, such as "got SIGTERM"; None while it has not been asked.
        has_left: whether the end of this process has been decided.
    """

    def __init__(
        self, rank: int, time_limit_seconds: float | None, launcher: LauncherWatch, seconds_so_far: float
    ) -> None:
        self.reason: str | None = None
        self._rank = rank
        self._launcher = launcher
        self._time_limit_seconds = time_limit_seconds
        self._started = time.monotonic() - seconds_so_far
        self.has_left = False
        self._is_training = False
        self._is_over = False
        self._first_signal_at: float | None = None
        self._orphaned_at: float | None = None
        self._loss_of_peers: Callable[[], str | None] = lambda: None
        self._end_peers: Callable[[], None] = lambda: None

    @classmethod
    def of_this_process(cls, rank: int, time_limit_seconds: float | None) -> StopRequest:
        """Make the request of this process, which has not been asked for anything yet."""
        process = psutil.Process()
        launcher = LauncherWatch.of(process, os.environ)
        return cls(rank, time_limit_seconds, launcher, time.time() - launch_created(process, os.environ))

    @property
    def is_made(self) -> bool:
        """Tell whether this rank has been asked to stop."""
        return self.reason is not None

    @property
    def elapsed_seconds(self) -> float:
        """Return how long ago the launch began."""
        return time.monotonic() - self._started

    def ask(self, reason: str) -> None:
        """Ask this rank to stop; the first reason counts."""
        if self.reason is None:
            self.reason = reason

    def watch_peers(self, loss: Callable[[], str | None], end: Callable[[], None]) -> None:
        """Know the other ranks, without which no agreement comes.

        Args:
            loss: returns a message that names those that have ended; None while all live.
            end: ends those of this machine that still live.
        """
        self._loss_of_peers = loss
        self._end_peers = end

    def begin_training(self) -> None:
        """Let requests wait for the end of a step from here on."""
        self._is_training = True

    def leave(self, handler: signal.Handlers) -> None:
        """Take in no signal and no loss of a peer any more; only the main thread can do that.

        Args:
            handler: SIG_IGN where this process ends in order, whatever a launcher sends it now; SIG_DFL where a signal
                may end it at once.
        """
        self.has_left = True
        for number in SIGNALS:
            signal.signal(number, handler)

    def end_listening(self) -> None:
        """Let the listening thread end within a second."""
        self._is_over = True

    def agree(self) -> bool:
        """Tell whether any rank has been asked to stop; collective, for where no step has just told it."""
        device = torch.device(get_accelerator().current_device_name())
        asked = torch.tensor(float(self.is_made), device=device)
        torch.distributed.all_reduce(asked, op=torch.distributed.ReduceOp.MAX)
        return bool(asked.item())

    def agreed_reason(self) -> str:
        """Say by what the first rank that has been asked to stop has been; collective."""
        reasons: list[str | None] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(reasons, self.reason)
        return next(f"rank {rank} {reason}" for rank, reason in enumerate(reasons) if reason is not None)

    # What the listening thread does

    def take_signal(self, number: int, now: float) -> None:
        """Take in a signal that came at the time ``now``, in seconds of the monotonic clock."""
        self._end_without_peers()
        name = signal.Signals(number).name
        exit_code = EXIT_CODE_OF_SIGNAL + number
        if not self._is_training:
            self._end_at_start(name, exit_code)
        if self._first_signal_at is not None and is_second_signal(now - self._first_signal_at):
            self._end(f"[megastable] rank {self._rank} got {name} once more and ends at once", exit_code)
        if self._first_signal_at is None or now - self._first_signal_at > SECOND_SIGNAL_SECONDS:
            self._first_signal_at = now
        if self.reason is None and self._rank == 0:
            write_soon(f"[megastable] {name}: the run stops after this step; another one ends it at once")
        self.ask(f"got {name}")

    def look_around(self, now: float) -> None:
        """Look whether launcher and peers still live and how late it is."""
        loss = self._launcher.loss()
        if loss is not None:
            self._take_loss_of_launcher(f"lost its launcher: {loss}", now)
        if self.is_made:
            self._end_without_peers()
        limit = self._time_limit_seconds
        if not self._is_training and limit is not None and self.elapsed_seconds > limit:
            over = f"megastable.training.time_limit = {limit:g} s is over"
            self._end(f"[megastable] {over} before the first step of rank {self._rank}", EXIT_CODE_ASKED_NOT_SAVED)

    def _end_at_start(self, signal_name: str, exit_code: int) -> None:
        message = f"[megastable] rank {self._rank} got {signal_name} before its first step: nothing to save"
        if self._rank != 0:
            # Rank 0 has got it, too, or a launcher ends this rank for the end of another one, which has said why.
            message = ""
        self._end(message, exit_code)

    def _take_loss_of_launcher(self, reason: str, now: float) -> None:
        if not self._is_training:
            self._end(f"[megastable] rank {self._rank} {reason}; it had not begun its first step", EXIT_CODE_FAILURE)
        self.ask(reason)
        if self._orphaned_at is None:
            self._orphaned_at = now
        if now - self._orphaned_at > ORPHAN_SECONDS:
            self._end_peers()
            text = f"rank {self._rank} {reason}; the ranks had not saved and left {ORPHAN_SECONDS:g} s later"
            end_process(f"[megastable] {text}", EXIT_CODE_FAILURE)

    def _end_without_peers(self) -> None:
        loss = self._loss_of_peers()
        if loss is not None:
            self._end(loss, EXIT_CODE_FAILURE)

    def _end(self, message: str, exit_code: int) -> None:
        # Peers that end after this rank has left are no loss, and may have ended while this thread looked at them.
        if not self.has_left:
            end_process(message, exit_code)

    def listen(self, read_end: int) -> None:
        """Look around every second, and take in the signals whose numbers come out of a pipe."""
        while not self._is_over:
            self.look_around(time.monotonic())
            ready, _, _ = select.select([read_end], [], [], LOOK_SECONDS)
            for number in os.read(read_end, 256) if ready else b"":
                if number in SIGNALS and not self.has_left:
                    self.take_signal(number, time.monotonic())


@contextlib.contextmanager
def listening(stop: StopRequest) -> Iterator[None]:
    """Hand signals to ``stop`` in place of what Python would do; those that were ignored before stay so.

    Afterwards all is as before, but where the rank has left: what comes while the interpreter ends is settled then.
    """
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    before = {number: signal.getsignal(number) or signal.SIG_DFL for number in SIGNALS}
    taken = [number for number in SIGNALS if before[number] is not signal.SIG_IGN]
    is_listening = True

    def put_back() -> None:
        nonlocal is_listening
        if is_listening and not stop.has_left:
            signal.set_wakeup_fd(-1)
            for number in taken:
                signal.signal(number, before[number])
        is_listening = False

    for number in taken:
        # Python writes the number of a signal into the pipe only where it has a handler for it.
        signal.signal(number, lambda *_: None)
        # Otherwise a system call of other code may fail for it.
        signal.siginterrupt(number, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    # A forked process would not end at a signal, and would pass it on to this one through the pipe.
    os.register_at_fork(after_in_child=put_back)
    threading.Thread(target=stop.listen, args=(read_end,), name="stop_request", daemon=True).start()
    try:
        yield
    finally:
        put_back()
        stop.end_listening()
