"""Steps that stand out and a loss that rises: what is judged, and what is not."""

from __future__ import annotations

import itertools
import json
import math
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.core.batch_rampup import Batch
from megastable.core.records import Candidate, Judgement, StepResult, TrainingState, Verdict
from megastable.core.robust import WindowOfBatches
from megastable.monitors import Monitors
from megastable.monitors.course import (
    EVEN_STEPS,
    FALLEN_STEPS,
    FEWEST_STEPS,
    SMOOTHED_STEPS,
    Divergence,
    Falls,
    Repeats,
    Spikes,
)
from megastable.monitors.monitor import Monitor, Seen
from megastable.planning.run_plan import RunPlan
from tests.support.tiny_run import tiny_run

quick = settings(max_examples=30, deadline=None)  # no deadline: the machine may be busy
WINDOW = 64


def plan_of(**settings_of_guard: Any) -> RunPlan:
    return RunPlan.of(tiny_run(megastable__stability={"window_steps": WINDOW, **settings_of_guard}), 1)


def step(loss: float, grad_norm: float = 1.0, size: int = 16, skipped: bool = False, vetoed: bool = False) -> Seen:
    result = StepResult(loss, grad_norm, 1.0, skipped, 1.0, vetoed=vetoed)
    return Seen(TrainingState(step=1, consumed_samples=size), Batch(size, 1, size), 0.1, result)


def observe(monitor: Monitor, *steps: Seen) -> None:
    for each in steps:
        assert list(monitor.observe(each)) == []


def judge(monitor: Monitor, loss: float, grad_norm: float = 1.0, size: int = 16) -> list[Judgement]:
    return list(monitor.judge(Candidate(loss, grad_norm, size)))


def noisy(seed: int, num_steps: int, sizes: Any = lambda index: 16) -> list[Seen]:
    """A loss that falls slowly, with noise that falls with the root of the batch, and norms that spread by factors."""
    draw = random.Random(seed)
    found = []
    for index in range(num_steps):
        size = sizes(index)
        loss = 3 + 3 * math.exp(-index / 100) + draw.gauss(0, 0.4) / math.sqrt(size)
        found.append(step(loss, math.exp(draw.gauss(0, 0.2)), size))
    return found


# Spikes


@quick
@given(st.integers(0, 10**6), st.sampled_from(["constant", "ramp", "jump by 16"]))
def test_noise_is_never_judged_whatever_the_batch_does(seed: int, batch: str) -> None:
    sizes = {
        "constant": lambda index: 16,
        "ramp": lambda index: 4 + index // 4,
        "jump by 16": lambda index: 4 if index < 150 else 64,
    }[batch]
    monitor = Spikes(plan_of())
    for each in noisy(seed, 300, sizes):
        assert judge(monitor, each.result.loss, each.result.grad_norm, each.batch.global_batch_size) == []
        observe(monitor, each)


@quick
@given(st.integers(0, 10**6))
def test_a_loss_that_jumps_goes_back_and_a_norm_that_jumps_is_skipped(seed: int) -> None:
    monitor = Spikes(plan_of())
    observe(monitor, *noisy(seed, 200))
    (of_loss,) = judge(monitor, loss=8.0)
    assert of_loss.verdict is Verdict.ROLLBACK and of_loss.kind == "spike" and "the loss, 8.0000," in of_loss.text
    (of_norm,) = judge(monitor, loss=3.4, grad_norm=100.0)
    assert of_norm.verdict is Verdict.SKIP and of_norm.data["of"] == "grad_norm"
    assert [each.data["of"] for each in judge(monitor, 8.0, 100.0)] == ["loss", "grad_norm"]
    # What falls is no harm.
    assert judge(monitor, loss=0.1, grad_norm=1e-9) == []


def test_few_steps_are_not_judged() -> None:
    monitor = Spikes(plan_of())
    observe(monitor, *noisy(1, FEWEST_STEPS - 1))
    assert judge(monitor, 100.0) == []
    observe(monitor, *noisy(2, 1))
    assert len(judge(monitor, 100.0)) == 1


def test_judging_remembers_nothing_and_neither_do_skipped_steps() -> None:
    monitor = Spikes(plan_of())
    observe(monitor, *noisy(1, 40))
    before = monitor.state_dict()
    for _ in range(100):
        judge(monitor, 50.0, 1e5)
        observe(monitor, step(50.0, 1e5, skipped=True, vetoed=True), step(math.nan, math.inf, skipped=True))
    assert monitor.state_dict() == before
    assert len(judge(monitor, 50.0)) == 1


def test_equal_losses_are_no_reason_to_judge_a_small_change() -> None:
    monitor = Spikes(plan_of())
    observe(monitor, *[step(2.0)] * 50)
    assert judge(monitor, 2.1, 1.2) == []
    assert len(judge(monitor, 2.5)) == 1


def test_a_loss_of_zero_is_judged_like_any_other() -> None:
    monitor = Spikes(plan_of())
    observe(monitor, *[step(0.0, 0.0)] * 40)
    assert judge(monitor, 0.0, 0.0) == []
    assert len(judge(monitor, 1.0, 0.0)) == 1


def test_a_new_level_is_got_used_to() -> None:
    """Where a run goes on with a warning, it is not warned of for ever."""
    monitor = Spikes(plan_of())
    observe(monitor, *noisy(1, 100))
    assert judge(monitor, 9.0)
    observe(monitor, *[step(9.0 + 0.05 * (index % 3)) for index in range(WINDOW)])
    assert judge(monitor, 9.0) == []


@given(st.lists(st.tuples(st.floats(-10, 10), st.integers(1, 64)), min_size=3, max_size=40), st.floats(-10, 10))
@quick
def test_deviations_do_not_depend_on_unit_or_origin(values: list[tuple[float, int]], value: float) -> None:
    window, moved = WindowOfBatches(40), WindowOfBatches(40)
    for each, size in values:
        window.add(each, size)
        moved.add(8 * each + 3, size)
    expected = window.deviations(value, 4, least_deviation=0.5)
    assert moved.deviations(8 * value + 3, 4, least_deviation=4.0) == pytest.approx(expected, abs=1e-6)


# A loss that rises


def run_up(monitor: Divergence, losses: list[float]) -> list[int]:
    """Return the steps that were judged."""
    judged = []
    for index, loss in enumerate(losses):
        judged += [index] * len(judge(monitor, loss))
        observe(monitor, step(loss))
    return judged


@quick
@given(st.integers(0, 10**6))
def test_a_loss_that_rises_slowly_is_judged_once_for_every_so_many_steps(seed: int) -> None:
    draw = random.Random(seed)
    monitor = Divergence(plan_of(divergence_steps=20, divergence_margin=0.5))
    course = [3 + 0.02 * max(0, index - 100) + draw.gauss(0, 0.05) for index in range(200)]
    judged = run_up(monitor, course)
    assert judged and 100 + 25 + 20 - SMOOTHED_STEPS < judged[0] < 100 + 25 + 20 + 2 * SMOOTHED_STEPS
    assert all(later - earlier == 20 for earlier, later in itertools.pairwise(judged))


@quick
@given(st.integers(0, 10**6))
def test_a_loss_that_falls_and_one_with_spikes_is_not(seed: int) -> None:
    draw = random.Random(seed)
    monitor = Divergence(plan_of(divergence_steps=20))
    course = [each.result.loss + 5 * (draw.random() < 0.05) for each in noisy(seed, 300)]
    assert run_up(monitor, course) == []


def test_a_vetoed_step_is_judged_once() -> None:
    monitor = Divergence(plan_of(divergence_steps=20))
    assert run_up(monitor, [2.0] * 40 + [4.0] * (20 + SMOOTHED_STEPS // 2 - 1)) == []
    (judgement,) = judge(monitor, 4.0)
    assert judgement.verdict is Verdict.ROLLBACK and "for 20 steps" in judgement.text
    observe(monitor, step(4.0, skipped=True, vetoed=True))
    assert judge(monitor, 4.0) == []


def test_a_step_that_is_not_finite_is_not_the_one_that_was_judged() -> None:
    monitor = Divergence(plan_of(divergence_steps=20))
    run_up(monitor, [2.0] * 40 + [4.0] * (20 + SMOOTHED_STEPS // 2 - 1))
    observe(monitor, step(math.nan, math.inf, skipped=True))
    assert len(judge(monitor, 4.0)) == 1


def test_harm_is_suspected_as_long_as_the_loss_is_too_high() -> None:
    monitor = Divergence(plan_of(divergence_steps=1000))
    observe(monitor, *[step(2.0)] * 40)
    assert not monitor.suspects_harm
    observe(monitor, *[step(4.0)] * SMOOTHED_STEPS)
    assert monitor.suspects_harm
    observe(monitor, *[step(2.0)] * SMOOTHED_STEPS)
    assert not monitor.suspects_harm


def test_losses_of_another_text_are_not_remembered() -> None:
    old, same, other = (Monitors(plan_of()) for _ in range(3))
    for each in noisy(1, 60):
        old.observe(each)
    memory = json.loads(json.dumps(old.state_dict()))
    same.load_state_dict(memory)
    other.load_state_dict(memory, is_same_text=False)
    far_off = Candidate(20.0, 1.0, 16)
    assert old.judge(far_off) == same.judge(far_off) != []
    assert other.judge(far_off) == []
    assert other.state_dict()["skipped_steps"] == memory["skipped_steps"]


@pytest.mark.parametrize("kind", [Spikes, Divergence])
@quick
@given(seed=st.integers(0, 10**6), at=st.integers(0, 120))
def test_nothing_is_lost_on_a_resume(kind: type[Monitor], seed: int, at: int) -> None:
    whole, first, resumed = kind(plan_of()), kind(plan_of()), kind(plan_of())
    steps = noisy(seed, 150)
    observe(whole, *steps)
    observe(first, *steps[:at])
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    observe(resumed, *steps[at:])
    assert json.dumps(resumed.state_dict()) == json.dumps(whole.state_dict())
    assert judge(resumed, 9.0, 50.0) == judge(whole, 9.0, 50.0)


# Falls


@quick
@given(seed=st.integers(0, 2**32))
def test_a_loss_that_falls_as_losses_do_is_not_judged(seed: int) -> None:
    monitor = Falls(plan_of())
    for each in noisy(seed, 200):
        assert judge(monitor, each.result.loss) == []
        observe(monitor, each)


@quick
@given(seed=st.integers(0, 2**32), depth=st.floats(0.7, 3.0))
def test_a_loss_that_stays_far_below_is_judged_at_its_fourth_step(seed: int, depth: float) -> None:
    monitor = Falls(plan_of())
    observe(monitor, *noisy(seed, 150))
    low = 3.67 - 1.5 - depth
    for number in range(1, FALLEN_STEPS + 1):
        judged = judge(monitor, low)
        assert [each.kind for each in judged] == ["fall"] * (number == FALLEN_STEPS)
        resumed = Falls(plan_of())
        resumed.load_state_dict(json.loads(json.dumps(monitor.state_dict())))
        monitor = resumed
        observe(monitor, step(low))
        assert not monitor.suspects_harm
    # Told once: the lower loss is what is usual now.
    for _ in range(150):
        assert judge(monitor, low) == []
        observe(monitor, step(low))


def test_a_single_easy_batch_is_not_judged() -> None:
    monitor = Falls(plan_of())
    for number, each in enumerate(noisy(1, 150)):
        loss = 0.1 if number > 50 and number % FALLEN_STEPS == 0 else each.result.loss
        assert judge(monitor, loss) == []
        observe(monitor, step(loss))


# Repeats


@quick
@given(seed=st.integers(0, 2**32), sizes=st.sampled_from([lambda index: 16, lambda index: 16 if index < 90 else 256]))
def test_noisy_losses_are_not_repeats(seed: int, sizes: Any) -> None:
    monitor = Repeats(plan_of())
    for each in noisy(seed, 250, sizes):
        assert judge(monitor, each.result.loss, size=each.batch.global_batch_size) == []
        observe(monitor, each)


@quick
@given(seed=st.integers(0, 2**32))
def test_an_even_loss_is_judged_at_its_eighth_step(seed: int) -> None:
    monitor = Repeats(plan_of())
    # Two losses that are of no line with what comes then.
    observe(monitor, *noisy(seed, 150), step(9.0), step(3.0))
    for number in range(1, EVEN_STEPS + 2):
        low = 3.5 - 0.002 * number
        assert judge(monitor, low) == []
        resumed = Repeats(plan_of())
        resumed.load_state_dict(json.loads(json.dumps(monitor.state_dict())))
        monitor = resumed
        observe(monitor, step(low))
    assert [each.kind for each in judge(monitor, 3.5 - 0.002 * (EVEN_STEPS + 2))] == ["repeat"]
    # Told once, and never acted on: less noise may be what is usual now.
    for number in range(EVEN_STEPS + 2, 400):
        judged = judge(monitor, 3.5 - 0.002 * number)
        assert len(judged) == (number == EVEN_STEPS + 2) and all(each.verdict is Verdict.WARN for each in judged)
        observe(monitor, step(3.5 - 0.002 * number))


@quick
@given(seed=st.integers(0, 2**32), fast=st.floats(0.01, 0.2), slow=st.floats(0.0, 0.005))
def test_a_loss_that_falls_fast_and_then_hardly_is_no_repeat(seed: int, fast: float, slow: float) -> None:
    """As in the first steps of a large model, whose noise is far below what it learns in a step."""
    draw = random.Random(seed)
    monitor = Repeats(plan_of())
    loss = 11.0
    for number in range(200):
        loss -= fast if number < 50 else slow
        noisy_loss = loss + draw.gauss(0, 0.01)
        assert judge(monitor, noisy_loss) == []
        observe(monitor, step(noisy_loss))
