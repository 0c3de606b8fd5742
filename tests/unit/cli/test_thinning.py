"""Fewer points of a curve: the extremes stay, in order, and never more than were asked for."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megastable.cli.thinning import FEWEST_POINTS, bucket_bounds, thinned

values = st.lists(st.none() | st.floats(-1e6, 1e6), max_size=300)
most = st.integers(FEWEST_POINTS, 60)


@given(values=values, most=most)
def test_never_more_than_asked_for_in_order_and_each_once(values: list[float | None], most: int) -> None:
    kept = thinned(values, most)
    assert len(kept) <= most
    assert kept == sorted(set(kept))
    assert all(0 <= index < len(values) for index in kept)


@given(values=values, most=most)
def test_the_extremes_and_the_ends_stay(values: list[float | None], most: int) -> None:
    kept = thinned(values, most)
    left = [values[index] for index in kept]
    finite = [value for value in values if value is not None]
    finite_left = [value for value in left if value is not None]
    assert (None in values) == (None in left)
    assert min(finite, default=0) == min(finite_left, default=0)
    assert max(finite, default=0) == max(finite_left, default=0)
    assert kept[:1] == [0][: len(values)]
    assert kept[-1:] == [len(values) - 1][: len(values)]


@given(values=values, most=most)
def test_the_extremes_of_every_bucket_stay(values: list[float | None], most: int) -> None:
    kept = set(thinned(values, most))
    bounds = bucket_bounds(len(values), (most - 2) // 3)
    for start, stop in pairwise(bounds):
        finite = [value for value in values[start:stop] if value is not None]
        left = {values[index] for index in kept if start <= index < stop}
        if finite:
            assert {min(finite), max(finite)} <= left
        if len(finite) < stop - start:
            assert None in left


@given(values=values)
def test_a_short_curve_stays_whole(values: list[float | None]) -> None:
    assert thinned(values, max(FEWEST_POINTS, len(values))) == list(range(len(values)))


@given(count=st.integers(0, 1000), buckets=st.integers(1, 50))
def test_buckets_cover_everything_and_differ_by_one(count: int, buckets: int) -> None:
    bounds = bucket_bounds(count, buckets)
    sizes = [stop - start for start, stop in pairwise(bounds)]
    assert sum(sizes) == count
    assert max(sizes) - min(sizes) <= 1


def test_too_few_points_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 5"):
        thinned([1.0], FEWEST_POINTS - 1)
