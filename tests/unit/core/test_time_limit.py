"""A run with a time limit: it keeps the limit while its steps and saves are none longer than it could know."""

from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.core.time_limit import ASSUMED_BYTES_PER_SECOND, LEAST_SAVE_SECONDS, TimeLimit

quick = settings(max_examples=100, deadline=None)  # no deadline: the machine may be busy
seconds = st.floats(0.01, 1000)


def end_of_run(limit: TimeLimit, start: float, rounds: list[float], saves: list[float]) -> float:
    """Play steps of these lengths, each with a save, and return when the last save has ended."""
    now = start
    for round_seconds, save_seconds in zip(rounds, saves, strict=True):
        is_last = limit.is_near(now)
        now += round_seconds
        limit.count_round(round_seconds)
        now += save_seconds
        limit.count_save(save_seconds)
        if is_last:
            break
    return now


@quick
@given(start=seconds, longest_round=seconds, longest_save=seconds, rounds=st.integers(2, 60), data=st.data())
def test_the_limit_is_kept(
    start: float, longest_round: float, longest_save: float, rounds: int, data: st.DataObject
) -> None:
    """Later rounds last at most one and a half times as long as the first, and saves as the assumption."""
    shares = data.draw(st.lists(st.floats(0.1, 1.5), min_size=rounds, max_size=rounds))
    lengths = [longest_round, *(share * longest_round for share in shares[1:])]
    saves = [longest_save, *(share / 1.5 * longest_save for share in shares[1:])]
    limit = TimeLimit(
        start + 6 * longest_round + 6 * longest_save + 2 * LEAST_SAVE_SECONDS,
        int(longest_save * ASSUMED_BYTES_PER_SECOND) + 1,
    )
    # Unless the plan ends before it.
    assert end_of_run(limit, start, lengths, saves) <= limit.seconds


@quick
@given(seconds, seconds)
def test_a_run_goes_on_while_there_is_ample_time(round_seconds: float, save_seconds: float) -> None:
    limit = TimeLimit(10 * (round_seconds + save_seconds + LEAST_SAVE_SECONDS), saved_bytes=0)
    limit.count_round(round_seconds)
    limit.count_save(save_seconds)
    assert not limit.is_near(0.5 * limit.seconds)
    assert limit.is_near(limit.seconds)


def test_the_first_save_takes_the_place_of_what_was_assumed() -> None:
    limit = TimeLimit(100, saved_bytes=int(40 * ASSUMED_BYTES_PER_SECOND))
    assert limit.is_near(21) and not limit.is_near(19)
    limit.count_save(10)
    assert limit.is_near(81) and not limit.is_near(79)
    limit.count_save(5)
    assert limit.is_near(81) and not limit.is_near(79)


def test_no_limit_is_never_near() -> None:
    limit = TimeLimit(float("inf"), saved_bytes=10**15)
    limit.count_round(1e9)
    assert not limit.is_near(1e9)
