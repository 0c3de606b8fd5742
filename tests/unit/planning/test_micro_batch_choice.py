"""The choice of micro-batches: legal, within the memory, and never slower than another that is."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.core.batch_rampup import Batch, BatchRampup, LinearRamp, StepRamp, global_batch_sizes
from megastable.core.errors import UserError
from megastable.core.memory import GIB
from megastable.core.pipeline_cost import MicroBatchTime, PipelineCost, StageTime
from megastable.planning.micro_batches import MicroBatchChoice

quick = settings(max_examples=25, deadline=None)
seconds = st.floats(0, 1)
times = st.builds(MicroBatchTime, seconds, st.floats(0.001, 1))
costs = st.builds(
    PipelineCost,
    st.lists(st.builds(StageTime, times, times), min_size=1, max_size=4).map(tuple),
    transfer=st.builds(MicroBatchTime, seconds, seconds),
    fixed_seconds=seconds,
)


def bytes_in_flight(batch: Batch) -> float:
    """Count the bytes of a pipeline of four stages whose samples need a GiB each, and whose weights need one."""
    return GIB * (1 + batch.micro_batch_size * min(4, batch.num_microbatches))


def splits(global_batch_size: int, replicas: int) -> list[Batch]:
    """List all splits of a batch."""
    samples = global_batch_size // replicas
    return [Batch(global_batch_size, size, samples // size) for size in range(1, samples + 1) if samples % size == 0]


@quick
@given(costs, st.integers(1, 3), st.integers(1, 24), st.sampled_from([2.0, 5.0, 9.0, 13.0, 30.0, math.inf]))
def test_nothing_that_fits_is_faster(cost: PipelineCost, replicas: int, samples: int, usable_gib: float) -> None:
    choice = MicroBatchChoice(replicas, cost, bytes_in_flight, usable_gib * GIB)
    fitting = [split for split in splits(samples * replicas, replicas) if bytes_in_flight(split) <= usable_gib * GIB]
    if not fitting:
        with pytest.raises(UserError, match="fits"):
            choice.batch_of(samples * replicas)
        return
    chosen = choice.batch_of(samples * replicas)
    assert chosen in fitting
    assert chosen.micro_batch_size * chosen.num_microbatches * replicas == samples * replicas
    fastest = min(cost.step_seconds(split.micro_batch_size, split.num_microbatches) for split in fitting)
    assert cost.step_seconds(chosen.micro_batch_size, chosen.num_microbatches) == fastest


@quick
@given(costs, st.integers(1, 24), st.floats(2, 40), st.floats(0, 40))
def test_more_memory_is_never_slower(cost: PipelineCost, samples: int, usable_gib: float, more_gib: float) -> None:
    def step_seconds(usable: float) -> float:
        try:
            batch = MicroBatchChoice(1, cost, bytes_in_flight, usable * GIB).batch_of(samples)
        except UserError:
            return math.inf
        return cost.step_seconds(batch.micro_batch_size, batch.num_microbatches)

    assert step_seconds(usable_gib + more_gib) <= step_seconds(usable_gib)


def test_of_equally_fast_splits_the_smaller_micro_batch_is_taken() -> None:
    line = MicroBatchTime(seconds_per_sample=1.0)
    one_stage = PipelineCost((StageTime(line, line),))
    assert MicroBatchChoice(1, one_stage, bytes_in_flight, math.inf).batch_of(12) == Batch(12, 1, 12)


def test_a_cost_of_every_micro_batch_makes_them_larger_and_the_bubble_smaller() -> None:
    """(m + 3)(1 + d) seconds on four stages with m d = 16: 38, 33, 35, 45, 68 for d = 1, 2, 4, 8, 16."""
    half = MicroBatchTime(0.5, 0.5)
    four_stages = PipelineCost((StageTime(half, half),) * 4)
    assert MicroBatchChoice(1, four_stages, bytes_in_flight, math.inf).batch_of(16).micro_batch_size == 2
    assert MicroBatchChoice(1, four_stages, bytes_in_flight, 8 * GIB).batch_of(16).micro_batch_size == 1


def test_where_nothing_fits_batch_need_and_limit_are_named() -> None:
    line = MicroBatchTime(seconds_per_sample=1.0)
    choice = MicroBatchChoice(2, PipelineCost((StageTime(line, line),)), bytes_in_flight, 4.5 * GIB)
    with pytest.raises(
        UserError, match=r"batch 16 over 2 replicas .* micro-batches of 1 .* 5.00 GiB .* 4.50 are usable"
    ):
        choice.batch_of(16)


@quick
@given(costs, st.integers(1, 3), st.lists(st.integers(1, 30), min_size=1, max_size=6, unique=True))
def test_the_steps_split_every_batch_of_the_ramp_as_chosen(
    cost: PipelineCost, replicas: int, samples: list[int]
) -> None:
    sizes = [replicas * count for count in sorted(samples)]
    ramp = StepRamp(tuple((100 * index, size) for index, size in enumerate(sizes)))
    assert global_batch_sizes(ramp) == sizes
    choice = MicroBatchChoice(replicas, cost, bytes_in_flight, math.inf)
    steps = choice.micro_batch_size_steps(sizes)
    phases = BatchRampup(ramp, 1, replicas, steps).phases(total_samples=1000)
    assert {phase.batch for phase in phases} <= {choice.batch_of(size) for size in sizes}
    assert all(before[1] != step[1] for before, step in pairwise(steps))


@quick
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 20), st.integers(1, 300))
def test_a_ramps_sizes_are_all_that_it_has(start: int, increment: int, increments: int, ramp_samples: int) -> None:
    ramp = LinearRamp(start, increment, start + increment * increments, ramp_samples)
    assert global_batch_sizes(ramp) == sorted({ramp.at(sample) for sample in range(ramp_samples + 1)})


def test_a_size_that_is_listed_twice_is_one() -> None:
    assert global_batch_sizes(StepRamp(((0, 4), (10, 4), (20, 8)))) == [4, 8]
