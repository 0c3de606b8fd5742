"""What a rank makes of signals, of the end of its launcher and of the clock; with real signals, in this process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.engine import stop_request
from megastable.engine.launcher_watch import LauncherWatch
from megastable.engine.stop_request import (
    ECHO_SECONDS,
    ORPHAN_SECONDS,
    SECOND_SIGNAL_SECONDS,
    SIGNALS,
    StopRequest,
    listening,
)

quick = settings(max_examples=100, deadline=None)  # no deadline: the machine may be busy


class Ended(Exception):  # noqa: N818  # it is no error here
    """Stands for the end of this process, with its message and exit code."""


@pytest.fixture(autouse=True)
def ending(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the end of the process be an exception."""

    def end(message: str, exit_code: int) -> NoReturn:
        raise Ended(message, exit_code)

    monkeypatch.setattr(stop_request, "end_process", end)


def request(
    launcher: LauncherWatch | None = None, time_limit: float | None = None, so_far: float = 0, rank: int = 1
) -> StopRequest:
    # Not rank 0, which tells the user of its signals.
    return StopRequest(rank, time_limit, launcher or LauncherWatch(), so_far)


def in_training(launcher: LauncherWatch | None = None) -> StopRequest:
    stop = request(launcher)
    stop.begin_training()
    return stop


def end_of(action: Callable[[], None]) -> tuple[str, int]:
    """Return message and exit code with which an action ends this process."""
    with pytest.raises(Ended) as ended:
        action()
    message, exit_code = ended.value.args
    return message, exit_code


@pytest.mark.parametrize("number", SIGNALS)
def test_before_the_first_step_a_signal_ends_the_process_with_the_code_of_shells(number: int) -> None:
    message, exit_code = end_of(lambda: request(rank=0).take_signal(number, now=0))
    assert exit_code == 128 + number
    assert signal.Signals(number).name in message and "nothing to save" in message
    # Rank 0 says it for all, unless it was rank 0 for whose end the launcher ends the others.
    assert end_of(lambda: request().take_signal(number, now=0)) == ("", 128 + number)


@quick
@given(st.lists(st.tuples(st.sampled_from(SIGNALS), st.floats(0, 30)), min_size=1, max_size=8))
def test_in_training_a_signal_is_a_request_and_only_a_second_one_within_ten_seconds_ends_the_process(
    signals: list[tuple[int, float]],
) -> None:
    stop = in_training()
    first = now = 0.0
    for position, (number, pause) in enumerate(signals):
        if position > 0:
            now += pause
            if ECHO_SECONDS <= now - first <= SECOND_SIGNAL_SECONDS:
                _, exit_code = end_of(lambda number=number, now=now: stop.take_signal(number, now))  # type: ignore[misc]
                assert exit_code == 128 + number
                return
            if now - first > SECOND_SIGNAL_SECONDS:
                first = now
        stop.take_signal(number, now)
        assert stop.reason == f"got {signal.Signals(signals[0][0]).name}"


def test_a_signal_after_the_death_of_a_peer_names_it_and_asks_nobody() -> None:
    """The launcher ends this rank for it; an agreement would never come."""
    stop = in_training()
    stop.watch_peers(lambda: "rank 0 is gone", lambda: None)
    assert end_of(lambda: stop.take_signal(signal.SIGTERM, now=0)) == ("rank 0 is gone", 1)


def test_a_rank_that_waits_for_an_agreement_notices_that_a_peer_has_died() -> None:
    stop = in_training()
    gone: list[str] = []
    stop.watch_peers(lambda: gone[0] if gone else None, lambda: None)
    stop.take_signal(signal.SIGTERM, now=0)
    stop.look_around(now=1)
    gone.append("rank 0 is gone")
    assert end_of(lambda: stop.look_around(now=2)) == ("rank 0 is gone", 1)


def test_peers_that_end_after_all_have_left_are_no_loss() -> None:
    stop = in_training()
    stop.watch_peers(lambda: "rank 0 is gone", lambda: None)
    stop.ask("got SIGTERM")
    stop.has_left = True
    stop.look_around(now=1)


def test_the_end_of_the_launcher_is_a_request_in_training_and_the_end_before() -> None:
    lost = LauncherWatch(loss="process 7 (deepspeed) has ended")
    message, exit_code = end_of(lambda: request(lost).look_around(now=0))
    assert exit_code == 1 and "process 7 (deepspeed) has ended" in message
    stop = in_training(lost)
    stop.look_around(now=0)
    assert stop.reason == "lost its launcher: process 7 (deepspeed) has ended"


@pytest.mark.parametrize("has_left", [False, True])
def test_ranks_that_hang_without_their_launcher_end_within_a_bound(has_left: bool) -> None:
    stop = in_training(LauncherWatch(loss="process 7 has ended"))
    killed = []
    stop.watch_peers(lambda: None, lambda: killed.append(1))
    stop.look_around(now=5)
    stop.has_left = has_left
    stop.look_around(now=5 + ORPHAN_SECONDS)
    message, exit_code = end_of(lambda: stop.look_around(now=5 + ORPHAN_SECONDS + 1))
    assert exit_code == 1 and "process 7 has ended" in message
    assert killed, "a stopped process cannot end itself"


def test_a_time_limit_that_is_over_before_the_first_step_ends_the_process() -> None:
    message, exit_code = end_of(lambda: request(time_limit=10, so_far=11).look_around(now=0))
    assert exit_code == 76 and "time_limit = 10 s" in message
    request(time_limit=10, so_far=2).look_around(now=0)
    stop = in_training()
    stop.look_around(now=0)
    assert not stop.is_made


# Real signals


@pytest.fixture
def stop() -> Iterator[StopRequest]:
    """Listen in this process."""
    stop = in_training()
    with listening(stop):
        yield stop


def wait_until(condition: Callable[[], bool], timeout_seconds: float = 20) -> None:
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_arrives_and_handlers_are_put_back(number: int) -> None:
    before = signal.getsignal(number)
    stop = in_training()
    with listening(stop):
        os.kill(os.getpid(), number)
        wait_until(lambda: stop.is_made)
    assert signal.getsignal(number) is before
    assert signal.set_wakeup_fd(-1) == -1


def test_what_was_ignored_stays_ignored() -> None:
    """As SIGHUP is under nohup, and SIGINT in the background of a script."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with listening(in_training()):
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_forked_process_ends_at_a_signal_and_asks_its_parent_for_nothing(stop: StopRequest) -> None:
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGTERM
    time.sleep(0.2)
    assert not stop.is_made


def test_a_program_that_a_rank_starts_ends_at_a_signal(stop: StopRequest) -> None:
    program = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    program.terminate()
    assert program.wait(timeout=20) == -signal.SIGTERM
    assert not stop.is_made


BLOCKED = """
import os, sys, time
from megastable.engine.process_end import end_process
read_end, write_end = os.pipe()
os.dup2(write_end, 1)
os.dup2(write_end, 2)
os.set_blocking(write_end, False)
try:
    while True:
        os.write(write_end, b"x" * 4096)
except BlockingIOError:
    os.set_blocking(write_end, True)
end_process("nobody reads this", 42)
"""


def test_a_process_ends_although_its_output_is_not_read() -> None:
    finished = subprocess.run([sys.executable, "-c", BLOCKED], timeout=120)
    assert finished.returncode == 42
