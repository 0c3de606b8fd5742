"""Weights over sources: exact to one sample at every prefix, wherever a run starts."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.core.blend import LONGEST_PERIOD, Blend, whole_weights

weight_lists = st.lists(st.integers(1, 60), min_size=1, max_size=7)


@settings(max_examples=100, deadline=None)
@given(weights=weight_lists, periods=st.integers(1, 3))
def test_every_prefix_has_its_share_to_within_one_sample(weights: list[int], periods: int) -> None:
    blend = Blend(weights)
    total = sum(weights)
    counts = [0] * len(weights)
    for position in range(periods * blend.period + 3):
        source, index = blend.at(position)
        assert index == counts[source], "every sample of a source is read once, in order"
        counts[source] += 1
        # In whole numbers: the share of a source is weight / total.
        for count, weight in zip(counts, weights, strict=True):
            assert abs(count * total - (position + 1) * weight) < total


@settings(max_examples=25, deadline=None)
@given(weights=st.lists(st.floats(0.01, 50).map(lambda weight: round(weight, 2)), min_size=2, max_size=4))
def test_decimal_weights_are_exact(weights: list[float]) -> None:
    blend = Blend(weights)
    counts = [0] * len(weights)
    exact = [Fraction(str(weight)) for weight in weights]
    for position in range(min(blend.period, 500)):
        source, _ = blend.at(position)
        counts[source] += 1
        for count, weight in zip(counts, exact, strict=True):
            assert abs(count - (position + 1) * weight / sum(exact)) < 1


@settings(deadline=None)
@given(weights=weight_lists, position=st.integers(0, 10**15))
def test_any_position_follows_from_its_place_in_the_period(weights: list[int], position: int) -> None:
    blend = Blend(weights)
    periods, place = divmod(position, blend.period)
    source, index = blend.at(place)
    assert blend.at(position) == (source, index + periods * blend.weights[source])


@settings(deadline=None)
@given(weights=weight_lists, start=st.integers(0, 500), length=st.integers(1, 200))
def test_no_batch_has_more_of_a_source_than_its_bound(weights: list[int], start: int, length: int) -> None:
    blend = Blend(weights)
    sources = [blend.at(position)[0] for position in range(start, start + length)]
    for source in range(len(weights)):
        assert sources.count(source) <= blend.most_of(source, length)


@pytest.mark.parametrize(
    ("weights", "whole"),
    [([0.7, 0.3], [7, 3]), ([2, 4], [1, 2]), ([0.29, 0.71], [29, 71]), ([5], [1]), ([1e-3, 1], [1, 1000])],
)
def test_weights_are_the_decimals_that_were_written(weights: list[float], whole: list[int]) -> None:
    assert whole_weights(weights) == whole


def test_a_period_too_long_for_a_table_is_refused() -> None:
    assert Blend([1, LONGEST_PERIOD - 1]).period == LONGEST_PERIOD
    with pytest.raises(ValueError, match="repeat after 1,000,001 samples"):
        Blend([1, LONGEST_PERIOD])
