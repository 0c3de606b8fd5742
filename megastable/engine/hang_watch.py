"""Ends a run in which a rank is stuck, and says which one it is, where it is, and who waits for it.

Where a rank is stopped or leaves the order of the collectives, the others wait for it inside of theirs, and no Python
runs in their main threads. So a thread of each rank speaks with the others, through the store in which they have met:

- It adds to a count of the run where its rank has made progress. A count that stands still for the time limit means
  that no rank goes on. A rank alone may wait for longer, as long as another one works.
- It sends a heartbeat and looks at that of the next rank. One that stands still for as long is of a rank that is
  stopped or dead, whatever the others do.

The first that notices either asks. Every rank that lives answers with its place and stack, the first makes a report of
the answers, and all end. Another thread ends its rank alone where the store itself does not answer and the rank does
not go on, either. Time is counted in a rank's own beats: one that was stopped together with all others, and goes on
with them, has missed none.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch.distributed
from torch._C._distributed_c10d import PrefixStore, Store

from megastable.core.errors import EXIT_CODE_HANG, UserError
from megastable.core.hangs import Answer, hang_report
from megastable.core.launch import Launch
from megastable.core.layout import ParallelLayout
from megastable.engine.process_end import claim_end, write_soon
from megastable.engine.process_group import Peer
from megastable.engine.progress import Progress

LONGEST_BEAT_SECONDS = 5.0
FEWEST_BEATS = 24
"""Beats that the time limit has at least."""
BEATS_TO_REPORT = 5
"""Beats of the time limit that are left for the report once a standstill is taken for a hang."""
BEATS_TO_ANSWER = 3
POLL_SECONDS = 0.05
REPORT_REACHES_ALL_WITHIN_SECONDS = 0.5

# Keys of the store, and what the verdict is where a rank has come to the end of the run.
PROGRESS = "progress"
VERDICT = "verdict"
REPORT = "report"
ALL_IS_WELL = "all is well"


@contextlib.contextmanager
def hangs_watched(
    launch: Launch, layout: ParallelLayout, peers: Sequence[Peer], progress: Progress, timeout_seconds: float
) -> Iterator[None]:
    """End this process and all others of the run where the run hangs while the block runs.

    Args:
        progress: is marked by all who make progress.
        timeout_seconds: the time from the last progress to the end.
    """
    if launch.world_size == 1:
        yield  # there is nobody to wait for
        return
    watch = HangWatch(launch, layout, peers, progress, timeout_seconds)
    watch.start()
    try:
        yield
    except UserError:  # all ranks leave together
        watch.stop()
        raise
    # After any other error this process ends soon, and the others have to notice that.
    watch.stop()


class Standstill:
    """Counts how often in a row a value was seen again."""

    def __init__(self) -> None:
        self.times = 0
        self._last: object = None

    def see(self, value: object) -> None:
        """Take note of the next value."""
        self.times = self.times + 1 if value == self._last else 0
        self._last = value


class HangWatch:
    """Watches from two threads, between ``start`` and ``stop``."""

    def __init__(
        self,
        launch: Launch,
        layout: ParallelLayout,
        peers: Sequence[Peer],
        progress: Progress,
        timeout_seconds: float,
    ) -> None:
        self._rank = launch.rank
        self._names = [f"{layout.describe(peer.rank)}, process {peer.process_id} on {peer.host}" for peer in peers]
        self._store_host = "the launcher" if launch.store_is_hosted else self._names[0]
        # One rank of each host, and not the one that is silent where the store is.
        here = [peer.rank for peer in peers if peer.host == peers[self._rank].host]
        self._speaks_alone = self._rank == min(set(here) - {0}, default=0)
        self._progress = progress
        self._limit = f"{timeout_seconds:g} s (megastable.training.hang_timeout)"
        self._beat_seconds = min(LONGEST_BEAT_SECONDS, timeout_seconds / FEWEST_BEATS)
        self._most_still_beats = int(timeout_seconds / self._beat_seconds) - BEATS_TO_REPORT
        self._store = _own_connection()
        self._exchanges = 0
        self._last_sign: object = None
        self._run = Standstill()
        self._next_rank = Standstill()
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._speak, self._watch_store)]

    def start(self) -> None:
        """Begin to watch."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End the watch on all ranks: nobody is missed who comes later to the end of the run."""
        self._stopped.set()
        for thread in self._threads:
            thread.join(LONGEST_BEAT_SECONDS)

    # As long as all is well

    def _speak(self) -> None:
        """Exchange heartbeats with the others until the end of the run."""
        while not self._stopped.wait(self._beat_seconds):
            try:
                self._exchange()
                self._exchanges += 1
            except RuntimeError:
                # The connection broke, and this rank must not seem dead for it. Where the store is gone with its host,
                # the rank finds that out in its next collective, or in the other thread.
                with contextlib.suppress(RuntimeError):
                    self._store = _own_connection()
        with contextlib.suppress(RuntimeError):
            self._store.compare_set(VERDICT, "", ALL_IS_WELL)

    def _exchange(self) -> None:
        """Tell the others how far this rank is, look whether they go on, and end with them where they do not."""
        sign = self._progress.sign()
        self._run.see(self._store.add(PROGRESS, int(sign != self._last_sign)))
        self._last_sign = sign
        self._store.set(f"beat/{self._rank}", f"{self._exchanges} {self._progress.place}")
        self._next_rank.see(self._last_beat((self._rank + 1) % len(self._names)))
        verdict = ""
        if self._store.check([VERDICT]):
            verdict = self._store.get(VERDICT).decode()
        elif self._run.times >= self._most_still_beats:
            verdict = self._accuse(f"no rank has made progress for {self._limit}")
        elif self._next_rank.times >= self._most_still_beats:
            verdict = self._accuse(f"a rank has shown no life for {self._limit}")
        if verdict == ALL_IS_WELL:
            self._stopped.set()
        elif verdict:
            self._end_together(verdict)

    def _last_beat(self, rank: int) -> str:
        key = f"beat/{rank}"
        # To get what was never set would wait for it.
        return self._store.get(key).decode() if self._store.check([key]) else "0 the start"

    def _accuse(self, reason: str) -> str:
        """Make a verdict where there is none yet, and return the one that stands."""
        return self._store.compare_set(VERDICT, "", f"{self._rank} {reason}").decode()

    # A hang

    def _end_together(self, verdict: str) -> NoReturn:
        """Answer where this rank is, let the rank that noticed the hang make a report, and end."""
        claim_end()
        noticed_by, reason = verdict.split(" ", maxsplit=1)
        # The store ends with its host, which may come before the report has reached this rank.
        with contextlib.suppress(RuntimeError):
            self._store.set(f"answer/{self._rank}", self._answer().to_json())
            if self._rank == int(noticed_by):
                self._store.set(REPORT, self._collected_report(reason))
            if self._is_set_within(REPORT, BEATS_TO_REPORT * self._beat_seconds):
                speaker, report = self._store.get(REPORT).decode().split(" ", maxsplit=1)
                if self._rank == int(speaker):
                    write_soon(report)
                time.sleep(REPORT_REACHES_ALL_WITHIN_SECONDS)
                os._exit(EXIT_CODE_HANG)
        self._end_alone(reason)

    def _collected_report(self, reason: str) -> str:
        """Wait for the answers and return the rank that is to print the report, and the report."""
        deadline = time.monotonic() + BEATS_TO_ANSWER * self._beat_seconds
        answers = []
        silent = {}
        for rank in range(len(self._names)):
            key = f"answer/{rank}"
            if self._is_set_within(key, deadline - time.monotonic()):
                answers.append(Answer.from_json(self._store.get(key).decode()))
            else:
                silent[rank] = self._last_beat(rank).split(" ", maxsplit=1)[1]
        return f"{answers[0].rank} {hang_report(reason, answers, silent, self._names)}"

    def _is_set_within(self, key: str, seconds: float) -> bool:
        """Wait for a key for at most so long, and tell whether it is there."""
        deadline = time.monotonic() + seconds
        while not self._store.check([key]):
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_SECONDS)
        return True

    def _answer(self) -> Answer:
        main_thread = sys._current_frames()[threading.main_thread().ident or 0]
        return Answer(
            self._rank,
            self._progress.place,
            time.monotonic() - self._progress.marked_at,
            "".join(traceback.format_stack(main_thread)),
            _entered_collectives(),
        )

    # A store that does not answer

    def _watch_store(self) -> None:
        """End this rank where neither it nor its exchange with the others goes on."""
        rank = Standstill()
        exchange = Standstill()
        while not self._stopped.wait(self._beat_seconds):
            rank.see(self._progress.sign())
            exchange.see(self._exchanges)
            if min(rank.times, exchange.times) >= self._most_still_beats:
                claim_end()
                # The others notice it at the same time: none ends before all are deaf to the ends of others.
                time.sleep(BEATS_TO_ANSWER * self._beat_seconds)
                self._end_alone(
                    f"no progress for {self._limit}, nor an answer from the store of the run, which {self._store_host} "
                    "serves. That is stopped or dead, or its machine is cut off"
                )

    def _end_alone(self, reason: str) -> NoReturn:
        if self._speaks_alone:
            write_soon(hang_report(reason, [self._answer()], {}, self._names))
        os._exit(EXIT_CODE_HANG)


def _own_connection() -> Store:
    """Connect to the store once more: on the first connection a request lasts as long as a new group needs."""
    store: Any = torch.distributed.distributed_c10d._get_default_store()  # torch's types do not have its ``clone``
    return PrefixStore("hang_watch", store.clone())


def _entered_collectives() -> dict[str, int]:
    """Count the collectives that this rank has entered in each group but that of all ranks.

    Where a stage sends to the next, that counts in the group of all, for two ranks alone.
    """
    c10d: Any = torch.distributed.distributed_c10d
    return {
        str(name): group._get_sequence_number_for_group()
        for group, name in c10d._world.pg_names.items()
        if group is not c10d._get_default_group()
    }
