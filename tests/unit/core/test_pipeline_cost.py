"""The cost of a step: the closed form against the pipeline played through, and calibration on measured steps."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.core.devices import DEVICES, find_device
from megastable.core.errors import UserError
from megastable.core.pipeline_cost import (
    MicroBatchTime,
    PassSeconds,
    PipelineCost,
    StageTime,
    bubble,
    equal_stages_seconds,
    pipeline_seconds,
    simulate,
)
from megastable.planning.measured_cost import MeasuredStep, calibrate, calibrate_unequal, line_through

quick = settings(max_examples=25, deadline=None)
seconds = st.floats(0.01, 10)
stages = st.integers(1, 8)
microbatches = st.integers(1, 60)
uneven = st.lists(st.tuples(seconds, seconds), min_size=1, max_size=8).map(
    lambda pairs: PassSeconds(tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs))
)


@quick
@given(stages, microbatches, seconds, seconds)
def test_equal_stages_take_what_the_closed_form_says(p: int, m: int, f: float, b: float) -> None:
    played = simulate(PassSeconds((f,) * p, (b,) * p), m)
    assert played == pytest.approx(equal_stages_seconds(p, m, f + b))
    cost = PipelineCost((StageTime(MicroBatchTime(f), MicroBatchTime(b)),) * p)
    assert cost.step_seconds(1, m) == pytest.approx(played)
    assert cost.idle_share(1, m) == pytest.approx(bubble(p, m), abs=1e-9)


@quick
@given(uneven, microbatches)
def test_a_long_step_that_is_cut_short_takes_as_long_as_one_played_through(passes: PassSeconds, m: int) -> None:
    assert pipeline_seconds(passes, 10 * m) == pytest.approx(simulate(passes, 10 * m))


@quick
@given(uneven, microbatches)
def test_a_step_lies_between_its_slowest_stage_and_a_pipeline_of_its_slowest_passes(
    passes: PassSeconds, m: int
) -> None:
    played = simulate(passes, m)
    through = passes.busy  # one micro-batch, forward and backward through all stages
    assert max(through, m * passes.slowest_stage) <= played * (1 + 1e-9)
    slowest_passes = max(passes.forward) + max(passes.backward)
    assert played <= equal_stages_seconds(len(passes.forward), m, slowest_passes) * (1 + 1e-9)


def played_in_the_order_of_1f1b(passes: PassSeconds, m: int) -> float:
    """Play every stage's list of passes, each as soon as its stage is free and its input is there."""
    p = len(passes.forward)
    seconds_of = {"F": passes.forward, "B": passes.backward}
    orders = []
    for stage in range(p):
        # The warmup fills the pipeline below this stage; from then on a backward pass makes room for a forward pass.
        in_flight = min(p - stage, m)
        order = [("F", micro_batch) for micro_batch in range(in_flight)]
        for micro_batch in range(m):
            order.append(("B", micro_batch))
            if micro_batch + in_flight < m:
                order.append(("F", micro_batch + in_flight))
        orders.append(order)
    ended: dict[tuple[str, int, int], float] = {("F", -1, i): 0.0 for i in range(m)}
    ended |= {("B", p, i): 0.0 for i in range(m)}
    clock = [0.0] * p
    while any(orders):
        for stage, order in enumerate(orders):
            while order:
                kind, micro_batch = order[0]
                source = stage - 1 if kind == "F" else stage + 1
                if (kind, source, micro_batch) not in ended:
                    break
                clock[stage] = max(clock[stage], ended[kind, source, micro_batch]) + seconds_of[kind][stage]
                ended[kind, stage, micro_batch] = clock[stage]
                order.pop(0)
    return max(clock)


@quick
@given(uneven, st.integers(1, 20))
def test_a_pipeline_is_played_in_the_order_of_1f1b(passes: PassSeconds, m: int) -> None:
    assert simulate(passes, m) == played_in_the_order_of_1f1b(passes, m)  # to the last bit


@quick
@given(uneven, st.integers(1, 4), st.integers(1, 300))
def test_no_step_is_shorter_than_its_bound(passes: PassSeconds, size: int, m: int) -> None:
    stages = tuple(
        StageTime(MicroBatchTime(f), MicroBatchTime(0.1, b))
        for f, b in zip(passes.forward, passes.backward, strict=True)
    )
    cost = PipelineCost(stages, MicroBatchTime(0.1, 0.2), fixed_seconds=1.0)
    assert cost.least_step_seconds(size, m) <= cost.step_seconds(size, m) * (1 + 1e-12)


def test_three_unequal_stages_by_hand() -> None:
    """Forward 1, 2, 1, backward 1, 2, 1, two micro-batches. Stage 1 is busy from 1 to 9 but for waiting from 5 to 5:
    F0 at 1 to 3, F1 at 3 to 5, then B0 (ready at 5) 5 to 7, B1 (ready at 7) 7 to 9; stage 0 ends B1 at 10."""
    assert simulate(PassSeconds((1, 2, 1), (1, 2, 1)), 2) == 10


def test_transfers_and_the_fixed_cost_are_counted() -> None:
    stage = StageTime(MicroBatchTime(0.5, 1.0), MicroBatchTime(0.5, 2.0))
    cost = PipelineCost((stage,) * 4, transfer=MicroBatchTime(seconds_per_sample=0.25), fixed_seconds=7.0)
    assert cost.step_seconds(2, 5) == pytest.approx((5 + 3) * (1.0 + 2 * 3.0 + 2 * 2 * 0.25) + 7.0)
    alone = PipelineCost((stage,), transfer=MicroBatchTime(seconds_per_sample=0.25))
    assert alone.step_seconds(2, 5) == pytest.approx(5 * 7.0)  # a single stage sends nothing


@quick
@given(st.floats(0, 1), st.floats(0.01, 1), st.floats(0, 5), stages)
def test_calibration_finds_the_costs_that_made_the_steps(a: float, b: float, c: float, p: int) -> None:
    made = [
        MeasuredStep(size, count, (count + p - 1) * (a + b * size) + c)
        for size, count in ((1, 2), (1, 8), (2, 4), (4, 16), (8, 3))
    ]
    found = calibrate(made, p)
    for step in made:
        assert found.step_seconds(step.micro_batch_size, step.num_microbatches) == pytest.approx(step.step_seconds)


@quick
@given(st.floats(0, 1), st.floats(0.01, 1), st.floats(0, 5), uneven)
def test_calibration_finds_the_costs_of_unequal_stages(a: float, b: float, c: float, work: PassSeconds) -> None:
    """A sample's work on every stage, in any unit, is enough for their shares of the three numbers."""

    def stages_of(fixed: float, per_sample: float) -> tuple[StageTime, ...]:
        def line(share: float) -> MicroBatchTime:
            return MicroBatchTime(fixed * share, per_sample * share)

        return tuple(StageTime(line(f), line(b)) for f, b in zip(work.forward, work.backward, strict=True))

    true = PipelineCost(stages_of(a, b), fixed_seconds=c)
    made = [
        MeasuredStep(size, count, true.step_seconds(size, count))
        for size, count in ((1, 2), (1, 8), (2, 4), (4, 16), (8, 3))
    ]
    found = calibrate_unequal(made, PipelineCost(stages_of(0, 1000.0)))
    for size, count in ((1, 1), (3, 7), (8, 40)):
        assert found.step_seconds(size, count) == pytest.approx(true.step_seconds(size, count))
        assert found.idle_share(size, count) == pytest.approx(true.idle_share(size, count))


@quick
@given(st.floats(0, 1), st.floats(0.01, 1))
def test_a_line_is_found_from_its_points(a: float, b: float) -> None:
    line = MicroBatchTime(a, b)
    found = line_through({size: line.at(size) for size in (1, 2, 8)})
    assert found.seconds == pytest.approx(a, abs=1e-9)
    assert found.seconds_per_sample == pytest.approx(b)
    through_one_point = line_through({4: line.at(4)})
    assert through_one_point.seconds == 0.0
    assert through_one_point.seconds_per_sample == pytest.approx(line.at(4) / 4)


@quick
@given(st.dictionaries(st.sampled_from([1, 2, 4, 8]), seconds, min_size=1))
def test_no_part_of_a_line_is_negative(points: dict[int, float]) -> None:
    found = line_through(points)
    assert found.seconds >= 0
    assert found.seconds_per_sample >= 0


def test_no_cost_is_calibrated_below_zero() -> None:
    found = calibrate([MeasuredStep(1, 4, 4.0), MeasuredStep(1, 8, 9.0)], num_stages=1)
    assert found.fixed_seconds == 0.0
    assert found.stages[0].forward.seconds_per_sample > 0


def test_one_batch_is_too_little_to_calibrate_on() -> None:
    with pytest.raises(UserError, match="at least two"):
        calibrate([MeasuredStep(1, 4, 4.0), MeasuredStep(1, 4, 4.1)], num_stages=2)


# BLOOM-176B: 12 stages x 8 replicas x 4 tensor ranks; what was published is TFLOPs per GPU at a global batch.
PUBLISHED = {16: 8.0, 192: 73.0, 384: 100.0, 2048: 150.0}
PREDICTED = {16: 10.1, 192: 73.0, 384: 101.8, 2048: 150.0}
REPLICAS, BLOOM_STAGES, DEVICES_PER_REPLICA = 8, 12, 48
FLOPS_PER_SAMPLE = 2.94e15


@pytest.mark.parametrize("micro_batch_size", [1, 2])
def test_blooms_published_points_beside_the_model_calibrated_on_two_of_them(micro_batch_size: int) -> None:
    """384 comes out within 2% of what was published; 16 does not (10.1 for 8), where the pipeline never fills.

    Which micro-batch size the measurements had was not published. It does not matter here: as long as all four had the
    same, a step is a line over the global batch, and only the share of that line's start that is bubble is different.
    """

    def measured(batch: int) -> MeasuredStep:
        count = batch // REPLICAS // micro_batch_size
        return MeasuredStep.of_throughput(
            PUBLISHED[batch], FLOPS_PER_SAMPLE, micro_batch_size, count, DEVICES_PER_REPLICA
        )

    cost = calibrate([measured(192), measured(2048)], BLOOM_STAGES)
    predicted = {
        batch: FLOPS_PER_SAMPLE * batch / REPLICAS / DEVICES_PER_REPLICA / 1e12
        / cost.step_seconds(micro_batch_size, batch // REPLICAS // micro_batch_size)
        for batch in PUBLISHED
    }  # fmt: skip
    assert predicted == pytest.approx(PREDICTED, rel=5e-3)
    assert predicted[384] == pytest.approx(PUBLISHED[384], rel=0.05)
    assert cost.fixed_seconds > 0


def test_every_device_has_every_format_and_is_found_in_any_case() -> None:
    for name, device in DEVICES.items():
        assert set(device.peak_tflops) == {"fp32", "bf16", "fp16"}
        assert 0 < device.usable_bytes < device.memory_gib * 2**30
        assert device.source
        assert find_device(name.lower()) is device
    with pytest.raises(UserError, match="--device B17: must be one of A100"):
        find_device("B17")
