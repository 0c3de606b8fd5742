"""What holds for every learning-rate schedule of the registry, and the shapes of those there are."""

import math
from dataclasses import fields
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.core.lr_schedule import BATCH_SCALING_EXPONENTS, LR_SCHEDULES, InverseSqrt, Step, WarmupSchedule

quick = settings(max_examples=25, deadline=None)  # no deadline: the machine may be busy


def schedule_of(name: str, **values: Any) -> WarmupSchedule:
    """Make the schedule with those of ``values`` that it reads; the rest are as in ``SHAPES``."""
    values = {"stable_samples": 300, "step_interval_samples": 100, "step_factor": 0.8, **values}
    schedule = LR_SCHEDULES[name]
    return schedule(**{field.name: values[field.name] for field in fields(schedule)})


def paper_share(samples: int) -> float:
    return math.sqrt(101 / (samples + 1))


LOWEST = paper_share(500)
# One row for each: the share of the decay that is left a quarter, half and three quarters through it, and at its end.
SHAPES = {
    "constant": (1.0, 1.0, 1.0, 1.0),
    "cosine": (0.5 + math.sqrt(2) / 4, 0.5, 0.5 - math.sqrt(2) / 4, 0.0),
    "inverse_sqrt": tuple((paper_share(samples) - LOWEST) / (1 - LOWEST) for samples in (200, 300, 400, 500)),
    "linear": (0.75, 0.5, 0.25, 0.0),
    "step": (0.7, 0.46, 0.268, 0.0),  # (3.0 * 0.8**k - 1.0) / 2.0: of 3.0 itself, not of the 2.0 above min_lr
    "warmup_stable_decay": (1.0, 1.0, 0.5, 0.0),
}
every_schedule = pytest.mark.parametrize("name", sorted(LR_SCHEDULES))


@st.composite
def schedule_arguments(draw: st.DrawFn) -> dict[str, Any]:
    """Draw legal arguments; no length need be above 0, and the constant part may end anywhere."""
    min_lr, more = draw(st.floats(0, 1)), draw(st.floats(0, 1))
    warmup, decay = draw(st.integers(0, 1000)), draw(st.integers(0, 1000))
    return {
        "max_lr": min_lr + more,
        "min_lr": min_lr,
        "warmup_samples": warmup,
        "end_samples": warmup + decay,
        "stable_samples": draw(st.integers(0, 2500)),
        "step_interval_samples": draw(st.integers(0, 500)),
        "step_factor": draw(st.floats(0, 1, exclude_min=True, exclude_max=True)),
    }


def test_every_schedule_has_a_row_here() -> None:
    assert SHAPES.keys() == LR_SCHEDULES.keys(), "a schedule needs a row in SHAPES: the shares left at four positions"


@every_schedule
def test_shape_of_the_decay(name: str) -> None:
    schedule = schedule_of(name, max_lr=3.0, min_lr=1.0, warmup_samples=100, end_samples=500)
    seen = [schedule.at(samples) for samples in (200, 300, 400, 500)]
    assert seen == pytest.approx([1.0 + 2.0 * share for share in SHAPES[name]], rel=1e-12)


@every_schedule
@quick
@given(arguments=schedule_arguments())
def test_peak_at_the_warmups_end_and_end_value_from_the_decays_end_on(name: str, arguments: dict[str, Any]) -> None:
    schedule = schedule_of(name, **arguments)
    max_lr, warmup, end = arguments["max_lr"], arguments["warmup_samples"], arguments["end_samples"]
    end_value = max_lr if name == "constant" else arguments["min_lr"]
    if end > warmup:
        assert schedule.at(warmup) == max_lr
    if warmup:
        assert schedule.at(0) == 0.0
        half = warmup // 2
        assert schedule.at(half) == pytest.approx(max_lr * half / warmup)
        assert schedule.at(warmup - 1) <= max_lr
    for samples in (end, end + 1, end + 10**9):
        assert schedule.at(samples) == end_value


@every_schedule
@quick
@given(arguments=schedule_arguments())
def test_up_during_the_warmup_and_never_up_after_it(name: str, arguments: dict[str, Any]) -> None:
    schedule = schedule_of(name, **arguments)
    warmup, end, slack = arguments["warmup_samples"], arguments["end_samples"], 1e-12
    step = max(1, (end + 10) // 60)
    for before, after in pairwise(range(0, end + 10, step)):
        if after < warmup:
            assert schedule.at(before) <= schedule.at(after) + slack
        elif before >= warmup:
            assert schedule.at(before) >= schedule.at(after) - slack
        assert 0 <= schedule.at(after) <= arguments["max_lr"]
        if after >= warmup:
            assert schedule.at(after) >= arguments["min_lr"] - slack


@every_schedule
def test_no_warmup_starts_at_the_peak(name: str) -> None:
    for end_samples in (1, 10):
        schedule = schedule_of(name, max_lr=1.0, min_lr=0.1, warmup_samples=0, end_samples=end_samples)
        assert schedule.at(0) == 1.0


@every_schedule
@pytest.mark.parametrize("end_samples", [0, 4, 8])
def test_a_decay_without_length_falls_to_its_end_at_once(name: str, end_samples: int) -> None:
    """Also where the run ends during the warmup."""
    schedule = schedule_of(name, max_lr=1.0, min_lr=0.1, warmup_samples=8, end_samples=end_samples)
    assert [schedule.at(samples) for samples in (0, 4, 7)] == pytest.approx([0.0, 0.5, 0.875])
    assert schedule.at(8) == pytest.approx(0.1 + 0.9 * SHAPES[name][-1])


@every_schedule
@quick
@given(arguments=schedule_arguments(), samples=st.integers(0, 3000))
def test_only_the_position_counts(name: str, arguments: dict[str, Any], samples: int) -> None:
    """A resumed run asks in another order and from another object."""
    schedule = schedule_of(name, **arguments)
    expected = schedule_of(name, **arguments).at(samples)
    schedule.at(samples + 100), schedule.at(0)
    assert schedule.at(samples) == expected


@every_schedule
@quick
@given(arguments=schedule_arguments(), factor=st.floats(0.001, 1), samples=st.integers(0, 3000))
def test_scaling_moves_the_peak_and_leaves_the_minimum(
    name: str, arguments: dict[str, Any], factor: float, samples: int
) -> None:
    schedule = schedule_of(name, **arguments)
    peak, min_lr = arguments["max_lr"] * factor, arguments["min_lr"]
    if name != "constant":
        peak = max(peak, min_lr)
        assert schedule.scaled(factor).at(arguments["end_samples"]) == min_lr
    assert schedule.scaled(factor).at(samples) == schedule_of(name, **{**arguments, "max_lr": peak}).at(samples)
    assert schedule.scaled(1.0) == schedule


# Shapes with more to say than their row


def test_inverse_sqrt_is_the_papers_curve_where_that_ends_at_the_minimum() -> None:
    """Vaswani et al., equation 3: after the warmup in proportion to the step's number to the power -1/2."""
    schedule = InverseSqrt(max_lr=1.0, min_lr=math.sqrt(100 / 10_000), warmup_samples=99, end_samples=9_999)
    for number in (100, 101, 400, 2_500, 9_999, 10_000):  # of the sample, counted from 1
        assert schedule.at(number - 1) == pytest.approx(math.sqrt(100 / number))


def test_step_holds_each_level_for_its_interval_and_stops_at_the_minimum() -> None:
    schedule = Step(
        max_lr=8.0, min_lr=1.5, warmup_samples=5, end_samples=1000, step_interval_samples=10, step_factor=0.5
    )
    levels = {5: 8.0, 14: 8.0, 15: 4.0, 24: 4.0, 25: 2.0, 34: 2.0, 35: 1.5, 999: 1.5, 1000: 1.5}
    assert {samples: schedule.at(samples) for samples in levels} == levels


def test_step_falls_at_the_end_from_wherever_it_is() -> None:
    schedule = Step(max_lr=8.0, min_lr=1.0, warmup_samples=0, end_samples=20, step_interval_samples=10, step_factor=0.5)
    assert [schedule.at(samples) for samples in (19, 20)] == [4.0, 1.0]


def test_a_constant_part_that_ends_before_the_warmup_leaves_the_whole_decay() -> None:
    early, none = (
        schedule_of("warmup_stable_decay", max_lr=1, min_lr=0, warmup_samples=40, end_samples=80, stable_samples=stable)
        for stable in (10, 40)
    )
    assert [early.at(samples) for samples in range(90)] == [none.at(samples) for samples in range(90)]


def test_exponents_of_the_batch_scaling() -> None:
    assert BATCH_SCALING_EXPONENTS == {"none": 0.0, "sqrt": 0.5, "linear": 1.0}
