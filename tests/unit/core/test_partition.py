"""Cuts into stages: every layer once, every stage legal, and no cut whose most expensive stage is cheaper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.core.flops import ATTENTION, BLOCK, FEED_FORWARD, HALVES, Recomputation
from megastable.core.layers import FlatLayer, LayerKind, flat_layers
from megastable.core.partition import (
    PARTITIONS,
    illegal_stages,
    imbalance,
    least_largest_sum,
    stage_bounds,
    stage_costs,
)
from tests.unit.core.test_flops import BLOOM
from tests.unit.core.test_layers import PLAIN, any_parts

quick = settings(max_examples=25, deadline=None)
costs = st.lists(st.integers(0, 30), min_size=1, max_size=9) | st.lists(st.integers(0, 2), min_size=4, max_size=9)


@st.composite
def models(draw: st.DrawFn) -> tuple[FlatLayer, ...]:
    """The layers of models whose head is cheap or expensive beside a block."""
    shape = replace(
        BLOOM,
        num_layers=draw(st.integers(1, 20)),
        padded_vocab_size=1024 * draw(st.integers(1, 3000)),
        seq_length=draw(st.sampled_from([128, 2048, 65_536])),
    )
    recomputed = Recomputation(draw(st.sampled_from([(), (ATTENTION,), (FEED_FORWARD,), HALVES, (BLOCK,)])))
    return flat_layers(shape, draw(any_parts()), recomputed)


def all_cuts(count: int, num_parts: int) -> list[tuple[int, ...]]:
    return [(0, *inner, count) for inner in combinations(range(1, count), num_parts - 1)]


def sums(values: Sequence[int], bounds: Sequence[int]) -> list[int]:
    return [sum(values[start:stop]) for start, stop in pairwise(bounds)]


@quick
@given(costs, st.data())
def test_the_largest_part_is_the_least_possible_then_the_squares_then_the_last_parts(
    values: list[int], data: st.DataObject
) -> None:
    num_parts = data.draw(st.integers(1, len(values)))

    def rank(bounds: tuple[int, ...]) -> tuple[int, int, list[int]]:
        parts = sums(values, bounds)
        return max(parts), sum(part * part for part in parts), parts[::-1]

    assert rank(least_largest_sum(values, num_parts)) == min(map(rank, all_cuts(len(values), num_parts)))


def test_more_parts_than_values_are_refused() -> None:
    with pytest.raises(ValueError, match="2 values make no 3 parts"):
        least_largest_sum((1, 2), 3)


@quick
@given(models(), st.data())
def test_balanced_is_legal_and_never_worse_than_another_legal_cut(
    layers: tuple[FlatLayer, ...], data: st.DataObject
) -> None:
    num_stages = data.draw(st.integers(1, len(layers) - 3))
    bounds = stage_bounds(layers, num_stages, "balanced")
    assert (bounds[0], bounds[-1], len(bounds)) == (0, len(layers), num_stages + 1)
    assert list(bounds) == sorted(set(bounds))
    assert illegal_stages(layers, bounds) == []
    highest = max(stage_costs(layers, bounds))
    others = [stage_bounds(layers, num_stages, method) for method in ("uniform", "parameters", "type:block")]
    for index in range(1, num_stages):  # one boundary, one layer further
        others += [tuple(b + move * (i == index) for i, b in enumerate(bounds)) for move in (-1, 1)]
    # Cuts inside the ends may save the few operations of a norm, or of the lookup.
    ends = [layers[0].cost + layers[1].cost, layers[-2].cost]
    for other in others:
        if not illegal_stages(layers, other):
            assert highest <= max(stage_costs(layers, other)) + max(ends)


@quick
@given(models(), st.data())
def test_every_method_covers_all_layers_in_order(layers: tuple[FlatLayer, ...], data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, len(layers) - 3))
    methods = [*PARTITIONS, "type:block", "type:NORM|head"]
    for method in methods:
        bounds = stage_bounds(layers, num_stages, method)
        assert (bounds[0], bounds[-1], len(bounds)) == (0, len(layers), num_stages + 1), method
        assert list(bounds) == sorted(bounds), method


@quick
@given(st.lists(st.integers(0, 5), min_size=1, max_size=6).filter(any))
def test_a_list_counts_blocks_and_the_ends_stay_at_the_ends(counts: list[int]) -> None:
    layers = flat_layers(replace(BLOOM, num_layers=sum(counts)), PLAIN, Recomputation())
    bounds = stage_bounds(layers, len(counts), tuple(counts))
    held = [[layer.kind for layer in layers[start:stop]] for start, stop in pairwise(bounds)]
    assert [kinds.count(LayerKind.BLOCK) for kinds in held] == counts
    assert [kind for kinds in held for kind in kinds] == [layer.kind for layer in layers]
    assert held[0][:2] == [LayerKind.EMBEDDING, LayerKind.EMBEDDING_FINISH]
    assert held[-1][-2:] == [LayerKind.FINAL_NORM, LayerKind.HEAD]
    empty = [stage for stage, blocks in enumerate(counts) if blocks == 0 and stage != len(counts) - 1]
    assert illegal_stages(layers, bounds) == empty


@quick
@given(models(), st.integers(2, 4))
def test_a_stage_is_legal_where_it_has_matrices_and_vectors(layers: tuple[FlatLayer, ...], num_stages: int) -> None:
    for bounds in all_cuts(len(layers), min(num_stages, 2)):
        illegal = illegal_stages(layers, bounds)
        for stage, (start, stop) in enumerate(pairwise(bounds)):
            kinds = [layer.kind for layer in layers[start:stop]]
            if LayerKind.BLOCK in kinds or {LayerKind.FINAL_NORM, LayerKind.HEAD} <= set(kinds):
                assert stage not in illegal
            elif kinds in ([LayerKind.EMBEDDING], [LayerKind.HEAD], [LayerKind.FINAL_NORM]):
                assert stage in illegal


def test_recomputation_makes_blocks_more_expensive_and_the_head_twice_its_forward() -> None:
    plain, again = (flat_layers(BLOOM, PLAIN, Recomputation(kinds)) for kinds in ((), (BLOCK,)))
    assert plain[2].cost == 3 * BLOOM.block_forward_flops
    assert again[2].cost == 4 * BLOOM.block_forward_flops
    products = 3 * 2 * BLOOM.seq_length * BLOOM.hidden_size * BLOOM.padded_vocab_size
    assert plain[-1].cost == again[-1].cost == pytest.approx(products, rel=0.001)
    assert 0 < plain[0].cost + plain[1].cost + plain[-2].cost < 0.001 * plain[2].cost


def test_a_large_model_is_balanced_where_its_layers_allow() -> None:
    """BLOOM's head is 2.2 of its blocks: 11 stages of 6 and one of 4 with the head."""
    layers = flat_layers(BLOOM, PLAIN, Recomputation((BLOCK,)))
    bounds = stage_bounds(layers, 12, "balanced")
    assert imbalance(stage_costs(layers, bounds)) < 0.05
    even = stage_bounds(layers, 12, (6,) * 10 + (5, 5))
    assert imbalance(stage_costs(layers, bounds)) < imbalance(stage_costs(layers, even))
