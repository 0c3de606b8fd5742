"""The batch ramp: BLOOM-176B's published figures, and what holds for every ramp."""

import itertools
import re
from collections.abc import Iterator
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.core.batch_rampup import (
    Batch,
    BatchRampup,
    GlobalBatchSchedule,
    LinearRamp,
    RunLength,
    StepRamp,
    global_batch_sizes,
)
from megastable.core.errors import UserError

quick = settings(max_examples=25, deadline=None)  # no deadline: the machine may be busy

GOLDEN = LinearRamp(start=192, increment=16, final=2048, ramp_samples=9_765_625)
GOLDEN_RAMP = BatchRampup(GOLDEN, micro_batch_size=1, data_parallel_size=8, micro_batch_size_steps=((784, 2),))


@st.composite
def linear_ramps(draw: st.DrawFn, unit: int = 1) -> LinearRamp:
    """Draw ramps whose sizes are multiples of ``unit``."""
    increment = unit * draw(st.integers(1, 6))
    start = unit * draw(st.integers(1, 12))
    num_increments = draw(st.integers(1, 12))
    final = start + increment * num_increments
    if draw(st.booleans()):
        return LinearRamp.per_increment(
            start=start, increment=increment, final=final, samples_per_increment=draw(st.integers(1, 200))
        )
    return LinearRamp(start, increment, final, draw(st.integers(1, 2000)))


@st.composite
def step_ramps(draw: st.DrawFn, unit: int = 1) -> StepRamp:
    """Draw step lists with sizes that never fall; neighbours may be equal."""
    positions = [0, *sorted(draw(st.sets(st.integers(1, 500), max_size=6)))]
    sizes = sorted(draw(st.lists(st.integers(1, 12), min_size=len(positions), max_size=len(positions))))
    return StepRamp(tuple((position, unit * size) for position, size in zip(positions, sizes, strict=True)))


@st.composite
def batch_rampups(draw: st.DrawFn) -> BatchRampup:
    """Draw ramps that fit their layout, some of them with a second micro-batch size."""
    micro, replicas = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    factor = draw(st.integers(1, 2))
    unit = micro * factor * replicas
    schedule = draw(st.one_of(linear_ramps(unit), step_ramps(unit)))
    steps = ((draw(st.integers(1, 12 * unit)), micro * factor),) if draw(st.booleans()) else ()
    return BatchRampup(schedule, micro, replicas, steps)


def steps_of(ramp: BatchRampup) -> Iterator[tuple[int, Batch]]:
    """Yield (consumed samples before the step, its batch) of one step after another, without end."""
    consumed = 0
    while True:
        batch = ramp.at(consumed)
        yield consumed, batch
        consumed += batch.global_batch_size


# BLOOM-176B


def test_golden_ramp_reaches_the_final_batch_where_bloom_did() -> None:
    first_final = next(
        (step, consumed)
        for step, (consumed, batch) in enumerate(steps_of(GOLDEN_RAMP))
        if batch.global_batch_size == 2048
    )
    assert first_final == (12_658, 9_765_808)


def test_golden_ramp_has_consumed_what_blooms_log_says() -> None:
    length = RunLength.of(GOLDEN_RAMP.phases(total_steps=12_695))
    assert (length.total_steps, length.total_samples) == (12_695, 9_841_584)


def test_golden_ramp_visits_every_size_and_changes_the_micro_batch_once() -> None:
    phases = GOLDEN_RAMP.phases(total_samples=220_000_000)
    assert [phase.batch.global_batch_size for phase in phases] == list(range(192, 2049, 16))
    assert {phase.batch.micro_batch_size for phase in phases if phase.batch.global_batch_size < 784} == {1}
    assert {phase.batch.micro_batch_size for phase in phases if phase.batch.global_batch_size >= 784} == {2}
    by_size = {phase.batch.global_batch_size: phase.batch for phase in phases}
    assert by_size[768] == Batch(768, 1, 96)
    assert by_size[784] == Batch(784, 2, 49)
    assert by_size[2048] == Batch(2048, 2, 128)


def test_the_same_number_read_per_increment_is_another_ramp() -> None:
    per_increment = LinearRamp.per_increment(start=192, increment=16, final=2048, samples_per_increment=9_765_625)
    assert per_increment.ramp_samples == 1_132_812_500  # 5 times the 220 million samples of the whole run
    assert per_increment.at(9_765_808) == 208
    assert per_increment.at(220_000_000) == 192 + 16 * 22
    assert GOLDEN.at(9_765_808) == 2048


# Every ramp


@quick
@given(linear_ramps(), st.integers(0, 4000))
def test_linear_ramp_is_the_exact_rational_formula(ramp: LinearRamp, consumed: int) -> None:
    samples_per_increment = Fraction(ramp.ramp_samples, (ramp.final - ramp.start) // ramp.increment)
    expected = min(ramp.start + ramp.increment * (consumed // samples_per_increment), ramp.final)
    assert ramp.at(consumed) == expected


@quick
@given(
    start=st.integers(1, 50),
    increment=st.integers(1, 9),
    num_increments=st.integers(1, 9),
    samples=st.integers(1, 100),
    consumed=st.integers(0, 1000),
)
def test_both_linear_forms_describe_one_ramp(
    start: int, increment: int, num_increments: int, samples: int, consumed: int
) -> None:
    final = start + increment * num_increments
    of_increment = LinearRamp.per_increment(
        start=start, increment=increment, final=final, samples_per_increment=samples
    )
    assert of_increment == LinearRamp(start, increment, final, samples * num_increments)
    assert of_increment.at(consumed) == min(start + increment * (consumed // samples), final)


@pytest.mark.parametrize("scale", [1, 10**9, 10**15])
def test_no_boundary_is_rounded_down(scale: int) -> None:
    """At 3/10 of a ramp of 10 increments, floats say 2.9999... for many lengths."""
    ramp = LinearRamp(start=10, increment=1, final=20, ramp_samples=10 * scale)
    for increments in range(11):
        assert ramp.at(increments * scale) == 10 + increments
        if increments:
            assert ramp.at(increments * scale - 1) == 10 + increments - 1


@quick
@given(st.one_of(linear_ramps(), step_ramps()))
def test_next_boundary_is_the_first_position_with_another_size(schedule: GlobalBatchSchedule) -> None:
    end = 3000
    sizes = [schedule.at(consumed) for consumed in range(end)]
    for consumed in range(0, end, 37):
        boundary = schedule.next_boundary(consumed)
        if boundary is None:
            assert set(sizes[consumed:]) == {sizes[consumed]}
        else:
            assert boundary > consumed
            assert len(set(sizes[consumed:boundary])) <= 1
            if boundary < end and isinstance(schedule, LinearRamp):  # a step list may repeat a size
                assert sizes[boundary] > sizes[consumed]


@quick
@given(st.one_of(linear_ramps(), step_ramps()))
def test_sizes_never_fall_nor_pass_the_final_one(schedule: GlobalBatchSchedule) -> None:
    if isinstance(schedule, LinearRamp):
        first, final = schedule.start, schedule.final
    else:
        assert isinstance(schedule, StepRamp)
        first, final = schedule.steps[0][1], schedule.steps[-1][1]
    sizes = [schedule.at(consumed) for consumed in range(0, 3000, 11)]
    assert sizes[0] == first
    assert all(before <= after for before, after in itertools.pairwise(sizes))
    assert schedule.at(10**12) == final == max([*sizes, final])


@quick
@given(batch_rampups(), st.integers(1, 120))
def test_phases_are_the_steps_one_by_one(ramp: BatchRampup, total_steps: int) -> None:
    phases = ramp.phases(total_steps=total_steps)
    expanded = [
        (phase.first_sample + index * phase.batch.global_batch_size, phase.batch)
        for phase in phases
        for index in range(phase.num_steps)
    ]
    assert expanded == list(itertools.islice(steps_of(ramp), total_steps))
    assert [phase.first_step for phase in phases] == [
        0, *itertools.accumulate(phase.num_steps for phase in phases[:-1])
    ]  # fmt: skip
    assert all(phase.num_steps > 0 for phase in phases)
    assert all(before.batch != after.batch for before, after in itertools.pairwise(phases))


@quick
@given(batch_rampups(), st.integers(1, 120))
def test_a_boundary_takes_effect_on_the_first_step_at_or_past_it(ramp: BatchRampup, total_steps: int) -> None:
    phases = ramp.phases(total_steps=total_steps)
    for before, after in itertools.pairwise(phases):
        last_old_step = after.first_sample - before.batch.global_batch_size
        size = before.batch.global_batch_size
        boundary = next(c for c in range(last_old_step, after.first_sample + 1) if ramp.schedule.at(c) != size)
        assert last_old_step < boundary <= after.first_sample


@quick
@given(batch_rampups())
def test_every_batch_is_its_own_product(ramp: BatchRampup) -> None:
    for phase in ramp.phases(total_steps=200):
        batch = phase.batch
        product = batch.micro_batch_size * batch.num_microbatches * ramp.data_parallel_size
        assert product == batch.global_batch_size
        assert batch.num_microbatches >= 1


@quick
@given(batch_rampups(), st.integers(1, 3000))
def test_a_run_of_samples_ends_with_the_first_step_that_reaches_them(ramp: BatchRampup, total_samples: int) -> None:
    length = RunLength.of(ramp.phases(total_samples=total_samples))
    assert length.last_step_start < total_samples <= length.total_samples
    assert RunLength.of(ramp.phases(total_steps=length.total_steps)) == length


@quick
@given(batch_rampups(), st.integers(1, 150))
def test_run_length_counts_the_steps_one_by_one(ramp: BatchRampup, total_steps: int) -> None:
    length = RunLength.of(ramp.phases(total_steps=total_steps))
    *_, (last_start, last_batch) = itertools.islice(steps_of(ramp), total_steps)
    assert length == RunLength(total_steps, last_start + last_batch.global_batch_size, last_start)
    again = RunLength.of(ramp.phases(total_samples=length.total_samples))
    assert again == length


# What is left of a run


@quick
@given(batch_rampups(), st.integers(1, 120), st.integers(0, 119))
def test_what_is_left_of_a_run_is_the_end_of_the_whole(ramp: BatchRampup, total_steps: int, done: int) -> None:
    """In steps and in samples, from any step on."""
    done = min(done, total_steps - 1)
    consumed, _ = next(itertools.islice(steps_of(ramp), done, None))
    whole = RunLength.of(ramp.phases(total_steps=total_steps))
    position = {"first_step": done, "first_sample": consumed}
    left = ramp.phases(total_steps=total_steps, **position)
    assert RunLength.of(left) == whole
    assert left == ramp.phases(total_samples=whole.total_samples, **position)
    assert [phase.batch for phase in left] == [phase.batch for phase in ramp.phases(total_steps=total_steps)][
        -len(left) :
    ]


@quick
@given(batch_rampups(), st.integers(0, 200), st.integers(0, 5000), st.integers(1, 400), st.integers(1, 6000))
def test_a_run_goes_on_from_any_place_to_its_end(
    ramp: BatchRampup, done: int, consumed: int, total_steps: int, total_samples: int
) -> None:
    """Another ramp may have led there, whose steps began elsewhere."""
    position = {"first_step": done, "first_sample": consumed}
    for totals in ({"total_steps": total_steps}, {"total_samples": total_samples}):
        step, sample, expected = done, consumed, []
        while step < total_steps if "total_steps" in totals else sample < total_samples:
            expected.append((step, sample, ramp.at(sample)))
            step, sample = step + 1, sample + ramp.at(sample).global_batch_size
        phases = ramp.phases(**totals, **position)
        assert [
            (phase.first_step + index, phase.first_sample + index * phase.batch.global_batch_size, phase.batch)
            for phase in phases
            for index in range(phase.num_steps)
        ] == expected
        if expected:
            last_start = expected[-1][1]
            assert RunLength.of(phases) == RunLength(step, sample, last_start)


def test_only_batches_that_are_left_have_to_divide() -> None:
    ramp = BatchRampup(StepRamp(((0, 9), (90, 16))), 2, 4)
    with pytest.raises(UserError):
        ramp.phases(total_samples=200)
    assert ramp.phases(total_samples=200, first_step=10, first_sample=90)[0].batch == Batch(16, 2, 2)
    with pytest.raises(UserError, match="global batch 9 "):
        ramp.phases(total_samples=200, first_step=10, first_sample=89)


@quick
@given(st.one_of(linear_ramps(), step_ramps()), st.integers(0, 3000))
def test_sizes_from_a_sample_on(schedule: GlobalBatchSchedule, first_sample: int) -> None:
    sizes = global_batch_sizes(schedule, first_sample)
    assert sizes == [size for size in global_batch_sizes(schedule) if size >= schedule.at(first_sample)]
    assert sizes[0] == schedule.at(first_sample)


@quick
@given(
    micro=st.integers(1, 9),
    steps=st.dictionaries(st.integers(1, 100), st.integers(1, 9), max_size=5),
    size=st.integers(1, 120),
)
def test_micro_batch_size_is_that_of_the_last_entry_reached(micro: int, steps: dict[int, int], size: int) -> None:
    ramp = BatchRampup(StepRamp(((0, 1),)), micro, 1, tuple(sorted(steps.items())))
    reached = [entry for entry in steps if entry <= size]
    assert ramp.micro_batch_size_for(size) == (steps[max(reached)] if reached else micro)


def test_a_step_list_that_repeats_a_size_is_one_phase_of_it() -> None:
    ramp = BatchRampup(StepRamp(((0, 8), (20, 8), (40, 8), (50, 16), (200, 16))), 1, 2)
    phases = ramp.phases(total_samples=400)
    assert [(phase.first_step, phase.first_sample, phase.num_steps) for phase in phases] == [(0, 0, 7), (7, 56, 22)]


# Sizes that do not divide


def sizes_named(error: UserError) -> dict[int, list[int]]:
    """Read the refused sizes from the message, and for each the legal neighbours that it names."""
    lines = re.findall(r"global batch (\d+) .*nearest legal sizes? (?:are|is) (.*)", str(error))
    return {int(size): [int(neighbour) for neighbour in neighbours.split(" or ")] for size, neighbours in lines}


@quick
@given(
    micro=st.integers(1, 5),
    replicas=st.integers(1, 5),
    schedule=st.one_of(linear_ramps(), step_ramps()),
    total_samples=st.integers(1, 3000),
)
def test_sizes_that_do_not_divide_are_all_listed_with_their_neighbours(
    micro: int, replicas: int, schedule: GlobalBatchSchedule, total_samples: int
) -> None:
    ramp, unit = BatchRampup(schedule, micro, replicas), micro * replicas
    visited, consumed = set(), 0
    while consumed < total_samples:
        visited.add(schedule.at(consumed))
        consumed += schedule.at(consumed)
    illegal = {size for size in visited if size % unit}
    if not illegal:
        ramp.phases(total_samples=total_samples)
        return
    with pytest.raises(UserError) as caught:
        ramp.phases(total_samples=total_samples)
    named = sizes_named(caught.value)
    assert named.keys() == illegal
    for size, neighbours in named.items():
        below, above = size - size % unit, size - size % unit + unit
        assert neighbours == ([below, above] if below else [above])
    assert f"micro-batch size {micro} x data-parallel size {replicas} = {unit}" in str(caught.value)


def test_a_size_that_the_run_does_not_reach_is_not_refused() -> None:
    ramp = BatchRampup(StepRamp(((0, 8), (100, 9))), 2, 4)
    assert len(ramp.phases(total_samples=104)) == 1  # 13 steps of 8, the last of which begins before sample 100
    with pytest.raises(UserError):
        ramp.phases(total_samples=105)


def test_reported_failure_a3() -> None:
    """MBS 4, DP 4, ramp from 8 by 8 to 64: half of the sizes are illegal, the first one too."""
    ramp = BatchRampup(LinearRamp(start=8, increment=8, final=64, ramp_samples=640), 4, 4)
    with pytest.raises(UserError) as caught:
        ramp.phases(total_samples=2000)
    assert sizes_named(caught.value) == {8: [16], 24: [16, 32], 40: [32, 48], 56: [48, 64]}


def test_named_neighbours_are_legal_across_a_micro_batch_step() -> None:
    ramp = BatchRampup(StepRamp(((0, 12),)), 1, 8, ((16, 3),))
    with pytest.raises(UserError) as caught:
        ramp.phases(total_samples=100)
    for neighbour in sizes_named(caught.value)[12]:
        BatchRampup(StepRamp(((0, neighbour),)), 1, 8, ((16, 3),)).phases(total_samples=100)


@quick
@given(st.integers(0, 10**15))
def test_large_runs_are_expanded_without_stepping(extra_samples: int) -> None:
    total = 10**18 + extra_samples
    phases = GOLDEN_RAMP.phases(total_samples=total)
    assert len(phases) == 117
    assert RunLength.of(phases).last_step_start < total <= RunLength.of(phases).total_samples
