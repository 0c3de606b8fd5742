"""The parts of the weight update that need no processes."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from megastable.core.pieces import Shard
from megastable.engine.flat_partitions import FlatPartition, HeldParameter, _counts_here
from megastable.engine.weight_update import NORM_CHUNK, _squares

quick = settings(max_examples=25, deadline=None)


@quick
@given(st.integers(0, 5 * NORM_CHUNK), st.floats(1e-6, 1e6), st.integers(0, 2**32 - 1))
def test_a_sum_of_squares_is_that_of_fp64(size: int, scale: float, seed: int) -> None:
    flat = torch.randn(size, generator=torch.Generator().manual_seed(seed)) * scale
    assert float(_squares(flat)) == pytest.approx(float(flat.double().square().sum()), rel=1e-6)


@quick
@given(st.integers(1, 3 * NORM_CHUNK), st.sampled_from([math.inf, -math.inf, math.nan]), st.data())
def test_one_bad_value_shows_wherever_it_is(size: int, bad: float, data: st.DataObject) -> None:
    flat = torch.ones(size)
    flat[data.draw(st.integers(0, size - 1))] = bad
    assert not math.isfinite(float(_squares(flat)))


@quick
@given(
    st.lists(st.tuples(st.integers(1, 9), st.booleans(), st.booleans(), st.booleans()), max_size=8), st.integers(0, 1)
)
def test_every_element_is_counted_here_or_a_copy(
    parameters: list[tuple[int, bool, bool, bool]], tensor_rank: int
) -> None:
    start, held, expected = 0, [], []
    for size, split, tied_copy, in_share in parameters:
        counts = not tied_copy and (split or tensor_rank == 0)
        mark = SimpleNamespace(model_parallel=split, ds_pipe_replicated=tied_copy)
        assert _counts_here(mark, tensor_rank) == counts
        if in_share:
            span = (start, start + size)
            held.append(HeldParameter("w", nn.Parameter(), Shard.whole((size,)), (0, size), span, counts))
        expected += [counts if in_share else None] * size
        start += size
    partition = FlatPartition(torch.zeros(start), held)
    seen: list[bool | None] = [None] * start
    for spans, counts in ((partition.counted, True), (partition.copies, False)):
        for first, last in spans:
            assert seen[first:last] == [None] * (last - first)
            seen[first:last] = [counts] * (last - first)
    assert seen == expected
    assert all(a[1] != b[0] for a, b in zip(partition.counted, partition.counted[1:], strict=False))
