"""What holds for every learning-rate schedule of the registry, and the shapes of those there are."""

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.core.lr_schedule import LR_SCHEDULES, WarmupSchedule

quick = settings(max_examples=25, deadline=None)  # no deadline: the machine may be busy

# One row for each: the share of the decay that is left a quarter, half and three quarters through it, and at its end.
SHAPES = {
    "constant": (1.0, 1.0, 1.0, 1.0),
    "cosine": (0.5 + math.sqrt(2) / 4, 0.5, 0.5 - math.sqrt(2) / 4, 0.0),
    "linear": (0.75, 0.5, 0.25, 0.0),
}
every_schedule = pytest.mark.parametrize("name", sorted(LR_SCHEDULES))


@st.composite
def schedule_arguments(draw: st.DrawFn) -> dict[str, float | int]:
    """Legal arguments; the warmup and the decay may have no length."""
    min_lr, more = draw(st.floats(0, 1)), draw(st.floats(0, 1))
    warmup, decay = draw(st.integers(0, 1000)), draw(st.integers(0, 1000))
    return {"max_lr": min_lr + more, "min_lr": min_lr, "warmup_samples": warmup, "end_samples": warmup + decay}


def test_every_schedule_has_a_row_here() -> None:
    assert SHAPES.keys() == LR_SCHEDULES.keys()


@every_schedule
def test_shape_of_the_decay(name: str) -> None:
    schedule = LR_SCHEDULES[name](max_lr=3.0, min_lr=1.0, warmup_samples=100, end_samples=500)
    seen = [schedule.at(samples) for samples in (200, 300, 400, 500)]
    assert seen == pytest.approx([1.0 + 2.0 * share for share in SHAPES[name]], rel=1e-12)


@every_schedule
@quick
@given(arguments=schedule_arguments())
def test_peak_at_the_warmups_end_and_end_value_from_the_decays_end_on(name: str, arguments: dict[str, int]) -> None:
    schedule: WarmupSchedule = LR_SCHEDULES[name](**arguments)
    warmup, end = schedule.warmup_samples, schedule.end_samples
    end_value = schedule.min_lr + (schedule.max_lr - schedule.min_lr) * SHAPES[name][-1]
    if end > warmup:
        assert schedule.at(warmup) == pytest.approx(schedule.max_lr)
    if warmup:
        assert schedule.at(0) == 0.0
        half = warmup // 2
        assert schedule.at(half) == pytest.approx(schedule.max_lr * half / warmup)
        assert schedule.at(warmup - 1) <= schedule.max_lr
    for samples in (end, end + 1, end + 10**9):
        assert schedule.at(samples) == pytest.approx(end_value)


@every_schedule
@quick
@given(arguments=schedule_arguments())
def test_up_during_the_warmup_and_never_up_after_it(name: str, arguments: dict[str, int]) -> None:
    schedule: WarmupSchedule = LR_SCHEDULES[name](**arguments)
    slack = 1e-12
    step = max(1, (schedule.end_samples + 10) // 60)
    for before, after in pairwise(range(0, schedule.end_samples + 10, step)):
        if after < schedule.warmup_samples:
            assert schedule.at(before) <= schedule.at(after) + slack
        elif before >= schedule.warmup_samples:
            assert schedule.at(before) >= schedule.at(after) - slack
        assert -slack <= schedule.at(after) <= schedule.max_lr + slack
        if after >= schedule.warmup_samples:
            assert schedule.at(after) >= schedule.min_lr - slack


@every_schedule
def test_no_warmup_starts_at_the_peak(name: str) -> None:
    schedule = LR_SCHEDULES[name](max_lr=1.0, min_lr=0.1, warmup_samples=0, end_samples=10)
    assert schedule.at(0) == pytest.approx(1.0)


@every_schedule
@pytest.mark.parametrize("end_samples", [0, 4, 8])
def test_a_decay_without_length_falls_to_its_end_at_once(name: str, end_samples: int) -> None:
    """Also where the run ends during the warmup."""
    schedule = LR_SCHEDULES[name](max_lr=1.0, min_lr=0.1, warmup_samples=8, end_samples=end_samples)
    assert [schedule.at(samples) for samples in (0, 4, 7)] == pytest.approx([0.0, 0.5, 0.875])
    assert schedule.at(8) == pytest.approx(0.1 + 0.9 * SHAPES[name][-1])


@every_schedule
@quick
@given(arguments=schedule_arguments(), samples=st.integers(0, 3000))
def test_only_the_position_counts(name: str, arguments: dict[str, int], samples: int) -> None:
    """A resumed run asks in another order and from another object."""
    schedule = LR_SCHEDULES[name](**arguments)
    expected = LR_SCHEDULES[name](**arguments).at(samples)
    schedule.at(samples + 100), schedule.at(0)
    assert schedule.at(samples) == expected
