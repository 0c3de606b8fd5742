"""Which states prove good and which the guard goes back to, whatever happens in between; weights are a number here."""

from __future__ import annotations

import itertools
from typing import Any, cast, get_args
from unittest.mock import patch

import pytest

from megastable.config.stability import StabilityConfig
from megastable.core.batch_rampup import Batch
from megastable.core.records import Candidate, Judgement, StepResult, TrainingState, Verdict
from megastable.engine.training_engine import TrainingEngine
from megastable.monitors import Monitors
from megastable.monitors.monitor import STOP, Seen
from megastable.training.recovery import CONFIRMED_AFTER_STEPS, DEEDS, DONE, UNEQUAL, Guard, returned

INTERVAL = 50
BATCH = Batch(4, 4, 1)


class CountingEngine:
    """Stands for weights by one number."""

    def __init__(self) -> None:
        self.weights = 0
        self.copies: list[list[int]] = []

    def snapshot(self, reused: list[int] | None) -> list[int]:
        copy = [0] if reused is None else reused
        if reused is None:
            self.copies.append(copy)
        copy[0] = self.weights
        return copy

    def movement_since(self, snapshot: Any) -> dict[str, float]:
        return {}

    def restore(self, snapshot: list[int]) -> None:
        self.weights = snapshot[0]


class ScriptedMonitors:
    """Thinks of a step what the test says."""

    def __init__(self) -> None:
        self.verdict = Verdict.CONTINUE
        self.suspects_harm = False

    def judge(self, candidate: Candidate) -> list[Judgement]:
        return [] if self.verdict is Verdict.CONTINUE else [Judgement(self.verdict, "spike", "because", {})]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Run:
    """Takes steps under a guard, as the loop does."""

    def __init__(self, policy: str = "rollback", first_step: int = 0) -> None:
        self.engine = CountingEngine()
        self.monitors = ScriptedMonitors()
        settings = StabilityConfig.model_validate({"guard": policy, "snapshot_interval": INTERVAL})
        self.guard = Guard(settings, cast(TrainingEngine, self.engine), cast(Monitors, self.monitors))
        self.state = TrainingState(step=first_step, consumed_samples=4 * first_step)
        self.guard.begin(self.state)

    def step(self, verdict: Verdict = Verdict.CONTINUE, finite: bool = True, suspected: bool = False) -> Verdict:
        self.monitors.verdict, self.monitors.suspects_harm = verdict, suspected
        self.guard.begin_step()
        vetoed = finite and self.guard.judge(Candidate(2.0, 1.0, 4))
        result = StepResult(2.0, 1.0, 1.0, vetoed or not finite, 1.0, vetoed=vetoed)
        self.state = self.state.advance(BATCH, result, 16)
        self.engine.weights = self.state.step
        deed = self.guard.deed([])
        if deed < Verdict.ROLLBACK:
            self.guard.count_step(Seen(self.state, BATCH, 0.1, result), None)
        return deed

    def steps(self, number: int, **options: Any) -> None:
        for _ in range(number):
            assert self.step(**options) is Verdict.CONTINUE

    def back_to(self) -> int | None:
        assert self.step(Verdict.ROLLBACK) is Verdict.ROLLBACK
        back = self.guard.go_back(self.state)
        if back is None:
            return None
        assert self.engine.weights == back.state.step, "the weights are of another step than the counts"
        self.state = back.state
        return back.state.step


def test_a_state_is_good_after_some_steps_and_no_sooner() -> None:
    run = Run()
    run.steps(INTERVAL + CONFIRMED_AFTER_STEPS - 1)
    assert run.back_to() == 0
    run.steps(INTERVAL + CONFIRMED_AFTER_STEPS)
    assert run.back_to() == INTERVAL


def test_no_more_than_two_copies_are_held() -> None:
    run = Run()
    run.steps(20 * INTERVAL)
    assert run.back_to() == 19 * INTERVAL
    assert len(run.engine.copies) == 2


@pytest.mark.parametrize("suspected_for", [30, 200])
def test_no_state_proves_good_while_the_loss_is_too_high(suspected_for: int) -> None:
    """A rollback for a loss that rises must not land where it rises already."""
    run = Run()
    run.steps(4 * INTERVAL + CONFIRMED_AFTER_STEPS)
    run.steps(suspected_for, suspected=True)
    assert run.back_to() == 4 * INTERVAL


def test_what_was_on_trial_is_forgotten_wherever_the_run_goes_back_to() -> None:
    run = Run(first_step=40)
    run.steps(5)
    run.step(Verdict.SKIP)  # the state at the start has not proved good
    run.steps(3)
    assert run.back_to() is None
    # It goes back to a checkpoint of step 40, and no state of the course that was left may prove good on the new one.
    run.state, run.engine.weights = TrainingState(step=40, consumed_samples=160), 40
    run.guard.begin(run.state)
    run.steps(CONFIRMED_AFTER_STEPS)
    assert run.back_to() == 40


def test_overflows_at_the_start_leave_a_state_to_go_back_to() -> None:
    run = Run()
    run.steps(3)
    run.steps(5, finite=False)
    run.steps(CONFIRMED_AFTER_STEPS)
    assert run.back_to() == 0


def test_after_a_veto_a_new_trial_begins_at_once_where_nothing_is_good_yet() -> None:
    run = Run()
    run.steps(5)
    run.step(Verdict.SKIP)
    run.steps(1 + CONFIRMED_AFTER_STEPS)
    assert run.back_to() == 7


@pytest.mark.parametrize("policy", DEEDS)
def test_unequal_weights_stop_the_run_under_every_policy(policy: str) -> None:
    run = Run(policy)
    run.steps(INTERVAL + CONFIRMED_AFTER_STEPS)
    seen = Seen(run.state, BATCH, 0.1, StepResult(2.0, 1.0, 1.0, False, 1.0))
    assert run.guard.deed([seen.event(STOP, "weights differ", **{UNEQUAL: ["a", "b"]})]) is Verdict.STOP
    other = run.guard.deed([seen.event(STOP, "skips in a row")])
    assert other is (Verdict.ROLLBACK if policy == "rollback" else Verdict.STOP)


def test_samples_that_were_left_out_stay_left_out() -> None:
    first = returned(TrainingState(step=20, consumed_samples=80), TrainingState(step=31, consumed_samples=124))
    assert first.data_position == 124 and first.left_out_samples == 44
    later = TrainingState(25, 100, left_out_samples=first.left_out_samples, rollbacks=first.rollbacks)
    second = returned(TrainingState(step=20, consumed_samples=80), later)
    assert second.data_position == 144 and [each.to_step for each in second.rollbacks] == [20, 20]


# What becomes of each verdict under each policy

POLICIES = get_args(StabilityConfig.model_fields["guard"].annotation)
OWN_DEED = {"warn": Verdict.WARN, "skip": Verdict.SKIP, "rollback": Verdict.ROLLBACK, "stop": Verdict.STOP}
"""Policy -> the harshest that it does of its own accord."""


def deed_of(policy: str, verdict: Verdict) -> Verdict:
    return Run(policy).step(verdict)


def test_every_policy_of_a_run_file_has_deeds_and_a_row_here() -> None:
    assert DEEDS.keys() == set(POLICIES) == OWN_DEED.keys()


@pytest.mark.parametrize("verdict", Verdict)
@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_done_follows_from_policy_and_verdict(policy: str, verdict: Verdict) -> None:
    run = Run(policy)
    deed = run.step(verdict)
    # A harsher verdict never has a milder end, and what is harmless is left alone.
    assert all(deed_of(policy, harsher) >= deed for harsher in Verdict if harsher > verdict)
    assert verdict > Verdict.WARN or deed is verdict
    # Nothing is done that the policy does not name, but for the stop that a monitor asks for; nothing is swallowed.
    assert deed <= OWN_DEED[policy] or deed is verdict is Verdict.STOP
    assert verdict is Verdict.CONTINUE or deed >= Verdict.WARN
    # The update is applied or not as the deed says, and the event tells it in words.
    assert run.state.skipped_steps == (deed >= Verdict.SKIP)
    told = run.guard.events(Seen(run.state, BATCH, 0.1, StepResult(2.0, 1.0, 1.0, False, 1.0)))
    assert [event.text for event in told] == ([] if verdict is Verdict.CONTINUE else [f"because: {DONE[deed]}"])


# What would stop a run may be over after a step back.
@pytest.mark.parametrize("verdict", [each for each in Verdict if each < Verdict.STOP])
def test_no_policy_is_milder_than_to_warn_nor_harsher_than_to_stop(verdict: Verdict) -> None:
    deeds = [deed_of(policy, verdict) for policy in POLICIES]
    assert deed_of("warn", verdict) == min(deeds) and deed_of("stop", verdict) == max(deeds)


@pytest.mark.parametrize("policy", POLICIES)
def test_of_several_judgements_the_harshest_deed_is_done(policy: str) -> None:
    for first, second in itertools.product(Verdict, repeat=2):
        run = Run(policy)
        judgements = [Judgement(each, "spike", "because", {}) for each in (first, second)]
        run.guard.begin_step()
        with patch.object(run.monitors, "judge", return_value=judgements):
            vetoed = run.guard.judge(Candidate(2.0, 1.0, 4))
        deed = run.guard.deed([])
        assert deed == max(deed_of(policy, first), deed_of(policy, second))
        assert vetoed == (deed >= Verdict.SKIP)
