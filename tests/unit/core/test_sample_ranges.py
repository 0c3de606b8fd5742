"""The positions of a step where ranges of samples are left out, against a walk along the order."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.core.sample_ranges import next_ranges, num_taken

quick = settings(max_examples=200, deadline=None)  # no deadline: the machine may be busy
ranges = st.tuples(st.integers(0, 60), st.integers(1, 20)).map(lambda drawn: (drawn[0], drawn[0] + drawn[1]))


def walk(position: int, count: int, left_out: list[tuple[int, int]]) -> list[int]:
    taken: list[int] = []
    while len(taken) < count:
        if not any(first <= position < after for first, after in left_out):
            taken.append(position)
        position += 1
    return taken


@quick
@given(st.integers(0, 60), st.integers(1, 40), st.lists(ranges, max_size=6))
def test_a_step_takes_the_next_positions_that_are_not_left_out(
    position: int, count: int, left_out: list[tuple[int, int]]
) -> None:
    found = next_ranges(position, count, left_out)
    assert [each for first, after in found for each in range(first, after)] == walk(position, count, left_out)
    assert all(first < after for first, after in found)


@quick
@given(st.lists(st.integers(1, 10), min_size=1, max_size=10), st.lists(ranges, max_size=4))
def test_steps_of_any_size_take_the_same_positions(sizes: list[int], left_out: list[tuple[int, int]]) -> None:
    taken = []
    position = 0
    for size in sizes:
        found = next_ranges(position, size, left_out)
        taken += [each for first, after in found for each in range(first, after)]
        position = found[-1][1]
    assert taken == walk(0, sum(sizes), left_out)


def test_ranges_of_any_size_cost_nothing() -> None:
    assert next_ranges(5, 10**15, [(10, 10**15)]) == [(5, 10), (10**15, 2 * 10**15 - 5)]


@quick
@given(st.integers(0, 60), st.integers(0, 60), st.lists(ranges, max_size=6))
def test_the_positions_that_are_not_left_out_are_counted(
    first: int, length: int, left_out: list[tuple[int, int]]
) -> None:
    after = first + length
    kept = [each for each in range(first, after) if not any(begin <= each < end for begin, end in left_out)]
    assert num_taken(first, after, left_out) == len(kept)
