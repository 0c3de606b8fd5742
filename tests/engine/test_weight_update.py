"""The parts of the weight update that need no processes."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.engine.flat_partitions import FlatPartition
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
    start, made, expected = 0, [], []
    for size, split, tied_copy, held in parameters:
        address = SimpleNamespace(start=start, numel=size)
        mapping = SimpleNamespace(hp_fragment_address=address) if held else None
        made.append(SimpleNamespace(_hp_mapping=mapping, model_parallel=split, ds_pipe_replicated=tied_copy))
        counts = not tied_copy and (split or tensor_rank == 0)
        expected += [None if not held else counts] * size
        start += size
    partition = FlatPartition(torch.zeros(start), made, tensor_rank)
    seen: list[bool | None] = [None] * start
    for spans, counts in ((partition.counted, True), (partition.copies, False)):
        for first, last in spans:
            assert seen[first:last] == [None] * (last - first)
            seen[first:last] = [counts] * (last - first)
    assert seen == expected
    assert all(a[1] != b[0] for a, b in zip(partition.counted, partition.counted[1:], strict=False))
