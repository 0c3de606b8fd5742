"""One process holds a lock, in whatever order several take it, give it back and die."""

from __future__ import annotations

import builtins
import os
import pathlib
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megastable.training import lock_file
from megastable.training.lock_file import HeldError, Holder, acquire, claim_on, look_at, release

NO_HURRY = 30.0


def record(token: str, ended: str | None = None) -> Holder:
    """Make a record; ``Turns.is_over`` goes by its token."""
    return Holder(
        host="host", process_id=1, started_ticks=1, id_space="", since="then", command="train", token=token, ended=ended
    )


# Every order of the single operations of several processes


class KilledError(BaseException):
    """Ends a contender in the middle of what it does."""


class Contender(threading.Thread):
    """Takes the lock and gives it back again, one operation a turn."""

    def __init__(self, turns: Turns, token: str, left: bytes | None) -> None:
        super().__init__(daemon=True)
        self.turns = turns
        self.token = token
        self.left = left
        """What it puts in the place of its record at the release."""
        self.may_go = threading.Semaphore(0)
        self.is_dead = False
        self.holds = False
        self.has_taken = False
        self.is_finished = False

    def run(self) -> None:
        """Take the lock, hold it for a turn, and give it back."""
        content = record(self.token).to_bytes()
        try:
            self.wait_for_turn()
            acquire(self.turns.path, content, lambda holder: None)
            self.holds = self.has_taken = True
            self.wait_for_turn()
            self.holds = False
            release(self.turns.path, content, self.left)
        except (HeldError, KilledError):
            self.holds = False
        finally:
            self.is_finished = True
            self.turns.is_done.release()

    def wait_for_turn(self) -> None:
        """Wait until this contender may do its next operation."""
        self.turns.is_done.release()
        assert self.may_go.acquire(timeout=NO_HURRY)
        if self.is_dead:
            raise KilledError


class Turns:
    """Lets one contender at a time do one operation on the file system."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_done = threading.Semaphore(0)
        self.contenders: list[Contender] = []
        """Those that are over, beside those whose record says so."""
        self.over: set[str] = set()

    def start(self, left: list[bytes | None]) -> None:
        """Bring every contender to its first operation."""
        self.contenders = [Contender(self, f"contender {number}", each) for number, each in enumerate(left)]
        for contender in self.contenders:
            contender.start()
            assert self.is_done.acquire(timeout=NO_HURRY)

    def go(self, contender: Contender, event: str = "") -> None:
        """Let a contender do its next operation; die before it, or be taken for dead before it when it holds."""
        if contender.is_finished:
            return
        if event == "die":
            contender.is_dead = True
            self.over.add(contender.token)
        if event == "freeze" and contender.holds:
            contender.holds = False
            self.over.add(contender.token)
        contender.may_go.release()
        assert self.is_done.acquire(timeout=NO_HURRY)
        in_place = self.path.read_bytes() if self.path.exists() else b""
        for holding in self.contenders:
            assert not holding.holds or in_place == record(holding.token).to_bytes(), "another has taken the lock"

    def is_over(self, holder: Holder) -> bool:
        """Stand for the look at a process."""
        return holder.ended is not None or holder.token in self.over


def wait_for_turn() -> None:
    """Hold an operation up, in a contender's thread."""
    thread = threading.current_thread()
    if isinstance(thread, Contender):
        thread.wait_for_turn()


@contextmanager
def single_operations(turns: Turns) -> Iterator[None]:
    """Let every operation of a contender wait for its turn."""

    def in_turn(function: Any) -> Any:
        def call(*arguments: Any, **keywords: Any) -> Any:
            wait_for_turn()
            return function(*arguments, **keywords)

        return call

    class Os:
        open = staticmethod(in_turn(os.open))
        read = staticmethod(in_turn(os.read))
        replace = staticmethod(in_turn(os.replace))
        fsync = staticmethod(lambda descriptor: None)

        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lock_file, "os", Os())
        # A file that is opened for writing is there before its content is.
        patch.setattr(lock_file, "open", in_turn(builtins.open), raising=False)
        patch.setattr(pathlib.Path, "unlink", in_turn(pathlib.Path.unlink))
        patch.setattr(time, "sleep", lambda seconds: wait_for_turn())
        patch.setattr(Holder, "is_over", lambda holder: turns.is_over(holder))
        # A file without a record is one that a contender is just writing, and no schedule here lets it sleep for that.
        patch.setattr(lock_file, "STALE_SECONDS", 1e6)
        yield


def leave_nothing(path: Path) -> None:
    """Begin with no lock."""


def leave_ended(path: Path) -> None:
    """Begin with the record of a run that has ended."""
    path.write_bytes(record("before", ended="now").to_bytes())


def leave_dead(path: Path) -> None:
    """Begin with the record of a run that was killed."""
    path.write_bytes(record("dead").to_bytes())


def leave_dead_claims(path: Path) -> None:
    """Begin with the record of a run that was killed, and with two that died one after the other in succeeding it."""
    leave_dead(path)
    claim = claim_on(path, path.read_bytes())
    claim.write_bytes(record("dead claim").to_bytes())
    claim_on(claim, claim.read_bytes()).write_bytes(record("dead claim on a claim").to_bytes())


BEGINNINGS = (leave_nothing, leave_ended, leave_dead, leave_dead_claims)
LEFT = (None, record("of a release", ended="now").to_bytes(), record("dead").to_bytes())


events = st.sampled_from(["", "", "", "", "", "", "die", "freeze"])


# One has seen that the holder is dead, and only goes on when another has succeeded it.
@example(begin=leave_dead, left=[None, None], schedule=[(1, 4, ""), (0, 9, ""), (1, 5, "")])
# One is taken for dead, and gives the lock back while another succeeds it.
@example(
    begin=leave_nothing,
    left=[None, None],
    schedule=[(0, 3, ""), (0, 1, "freeze"), (1, 8, ""), (0, 3, ""), (1, 1, ""), (0, 1, "")],
)
@settings(max_examples=120, deadline=None)
@given(
    begin=st.sampled_from(BEGINNINGS),
    left=st.lists(st.sampled_from(LEFT), min_size=2, max_size=4),
    # Who goes, how many operations, and what befalls it before the first of them.
    schedule=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 15), events), max_size=30),
)
def test_never_do_two_hold_the_lock(
    begin: Callable[[Path], None], left: list[bytes | None], schedule: list[tuple[int, int, str]]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        turns = Turns(Path(folder) / "run.lock")
        turns.over |= {"dead", "dead claim", "dead claim on a claim"}
        begin(turns.path)
        with single_operations(turns):
            turns.start(left)
            for chosen, num_operations, event in schedule:
                for number in range(num_operations):
                    turns.go(turns.contenders[chosen % len(left)], event if number == 0 else "")
            # Then all come to their end as soon as they can; a file that a dead one left empty keeps others waiting.
            for _ in range(100):
                for contender in turns.contenders:
                    turns.go(contender)
            for contender in turns.contenders:
                turns.go(contender, "die")
        if not any(contender.is_dead and not contender.has_taken for contender in turns.contenders):
            assert any(contender.has_taken for contender in turns.contenders), "all were refused"
        check_a_late_one_gets_it(turns)


def check_a_late_one_gets_it(turns: Turns) -> None:
    """Whatever is left by those that have ended, it keeps nobody out for ever."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Holder, "is_over", lambda holder: turns.is_over(holder))
        patch.setattr(lock_file, "STALE_SECONDS", 0.003)
        patch.setattr(lock_file, "POLL_SECONDS", 0.001)
        content = record("late").to_bytes()
        acquire(turns.path, content, lambda holder: None)
    seen = look_at(turns.path)
    assert seen is not None and seen.content == content
