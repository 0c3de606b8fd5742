"""A sweep over batches: which are swept, which are measured how often, and what is concluded from them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.core.batch_rampup import Batch
from megastable.core.errors import UserError
from megastable.planning.measured_cost import MeasuredStep, calibrate
from megastable.planning.throughput import (
    StepSeconds,
    Work,
    calibration_half,
    measured_row,
    median_unseen_error,
    parse_sizes,
    planned_row,
    recommended_start,
    steps_of_each,
    sweep_batches,
    takes_part,
)

quick = settings(max_examples=25, deadline=None)
WORK = Work(16, model_flops_per_sample=10**9, hardware_flops_per_sample=2 * 10**9, num_stages=4, data_parallel_size=2,
            num_devices=8)  # fmt: skip
sizes = st.lists(st.integers(1, 64), min_size=2, max_size=8, unique=True).map(sorted)
speeds = st.dictionaries(
    st.builds(Batch, st.integers(1, 9), st.integers(1, 3), st.just(1)), st.floats(0.1, 10), min_size=1
)
shares = st.floats(0.01, 1)


@pytest.mark.parametrize("text", ["", "2,", "2,x", "0,2", "-2", "2.5", "2,2", "1e3", "²"])
def test_sizes_that_are_none_are_refused_with_the_option(text: str) -> None:
    with pytest.raises(UserError, match="--sizes"):
        parse_sizes(text, "--sizes")


@quick
@given(st.permutations([1, 2, 30]))
def test_sizes_come_in_rising_order(given_sizes: list[int]) -> None:
    assert parse_sizes(" , ".join(map(str, given_sizes)), "--sizes") == [1, 2, 30]


@quick
@given(sizes, st.integers(1, 3), st.sampled_from([(1,), (2,), (1, 2)]))
def test_every_batch_multiplies_out(multiples: list[int], replicas: int, micro: tuple[int, ...]) -> None:
    swept = sweep_batches([2 * replicas * factor for factor in multiples], micro, replicas)
    assert len(swept) == len(multiples) * len(micro)
    for batch in swept:
        assert batch.global_batch_size == batch.micro_batch_size * batch.num_microbatches * replicas


def test_every_batch_that_does_not_divide_is_named() -> None:
    with pytest.raises(UserError) as caught:
        sweep_batches([4, 6, 8, 9], [2, 4], 1)
    assert [line.split()[2] for line in str(caught.value).splitlines()[1:]] == ["9", "6", "9"]


def test_one_batch_is_no_sweep() -> None:
    with pytest.raises(UserError, match="at least two"):
        sweep_batches([4], [2], 1)


@quick
@given(sizes, st.integers(1, 20))
def test_a_batch_is_measured_in_as_many_rounds_as_it_is_given(multiples: list[int], rounds: int) -> None:
    swept = sweep_batches(multiples, [1], 1)
    steps = steps_of_each(swept, rounds)
    for batch in swept:
        assert min(3, rounds) <= steps[batch] <= rounds
        assert sum(takes_part(number, steps[batch], rounds) for number in range(1, rounds + 1)) == steps[batch]
    in_order = [steps[batch] for batch in swept]
    assert in_order == sorted(in_order, reverse=True)


@quick
@given(sizes, st.sampled_from([(1,), (1, 2), (1, 2, 4)]))
def test_the_calibrated_half_has_every_micro_batch_size_and_leaves_some(
    multiples: list[int], micro: tuple[int, ...]
) -> None:
    swept = sweep_batches([4 * factor for factor in multiples], micro, 1)
    half = calibration_half(swept)
    assert len(half) >= 2
    assert {batch.micro_batch_size for batch in half} == set(micro)
    if len(multiples) > 2:
        assert len(swept) / 2 <= len(half) < len(swept)


@quick
@given(speeds, shares, shares)
def test_the_recommended_start_is_monotone_in_the_share_and_fast_enough(
    measured: dict[Batch, float], one: float, other: float
) -> None:
    low, high = (recommended_start(measured, share) for share in sorted((one, other)))
    assert low is not None and high is not None
    assert low.global_batch_size <= high.global_batch_size
    assert measured[low] >= min(one, other) * max(measured.values())
    smaller = [speed for batch, speed in measured.items() if batch.global_batch_size < low.global_batch_size]
    assert all(speed < min(one, other) * max(measured.values()) for speed in smaller)


def test_the_recommended_start_is_split_the_fastest_way() -> None:
    slow, fast, large = Batch(4, 1, 4), Batch(4, 2, 2), Batch(8, 1, 8)
    assert recommended_start({slow: 6.0, fast: 7.0, large: 10.0}, 0.5) == fast
    assert recommended_start({}, 0.5) is None


@quick
@given(st.floats(0.01, 1), st.floats(0, 5), st.integers(1, 30))
def test_the_share_of_the_limit_is_what_the_fixed_cost_leaves(per_sample: float, fixed: float, m: int) -> None:
    """Steps made by the model itself: bubble and passes are the limit, so only the fixed cost is missing."""
    made = [MeasuredStep(2, count, (count + 3) * 2 * per_sample + fixed) for count in (1, 8, 30)]
    cost = calibrate(made, WORK.num_stages)
    pipeline = (m + 3) * 2 * per_sample
    row = measured_row(Batch(4 * m, 2, m), WORK, StepSeconds.of([pipeline + fixed]), cost, cost, True)
    assert row.share_of_limit == pytest.approx(pipeline / (pipeline + fixed))
    assert row.error == pytest.approx(0, abs=1e-9)
    assert row.limit == pytest.approx(m / (m + 3)) == 1 - row.bubble


def test_a_measured_row_by_hand() -> None:
    cost = calibrate([MeasuredStep(2, 1, 8.0), MeasuredStep(2, 5, 16.0)], WORK.num_stages)  # 2 s a slot
    twice = calibrate([MeasuredStep(2, 1, 16.0), MeasuredStep(2, 5, 32.0)], WORK.num_stages)
    row = measured_row(Batch(20, 2, 5), WORK, StepSeconds.of([21.0, 20.0, 19.0, 50.0]), twice, cost, False)
    assert row.share_of_limit == pytest.approx(8 * 4 / 20.5)  # 8 slots of 4 s
    assert row.step_seconds == StepSeconds(median=20.5, least=19.0, most=50.0, num_steps=4)
    assert row.tokens_per_second == 20 * 16 / 20.5
    assert row.tflops_per_device == pytest.approx(20 * 1e9 / 20.5 / 8 / 1e12)
    assert row.hardware_tflops_per_device == pytest.approx(2 * (row.tflops_per_device or 0))
    assert row.predicted_step_seconds == pytest.approx(16.0)
    assert row.error == pytest.approx(16 / 20.5 - 1)


def test_the_median_error_is_of_the_unseen_rows_only() -> None:
    row = replace(planned_row(Batch(4, 2, 1), WORK), predicted_step_seconds=1.1, step_seconds=StepSeconds.of([1.0]))
    seen = replace(row, predicted_step_seconds=9.0, calibrated_on=True)
    far = replace(row, predicted_step_seconds=0.7)
    assert median_unseen_error([seen, row, far, seen]) == pytest.approx(0.2)
    assert median_unseen_error([seen, planned_row(Batch(4, 2, 1), WORK)]) is None
