"""The guard of a run: what becomes of a step that stands out, and the way back to a state before the harm was done."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megastable.config.stability import StabilityConfig
from megastable.core.records import Candidate, Event, Judgement, Rollback, TrainingState, Verdict
from megastable.engine.model_state import Snapshot
from megastable.engine.training_engine import TrainingEngine
from megastable.monitors import Monitors
from megastable.monitors.monitor import STOP, Seen

CONFIRMED_AFTER_STEPS = 10
"""Applied updates that nobody objected to, after which a state is a good one: harm shows some steps late."""

DEEDS: dict[str, dict[Verdict, Verdict]] = {
    "warn": {Verdict.SKIP: Verdict.WARN, Verdict.ROLLBACK: Verdict.WARN},
    "skip": {Verdict.ROLLBACK: Verdict.SKIP},
    # What would stop a run, such as skips in a row, may be over after a step back; but see ``UNEQUAL``.
    "rollback": {Verdict.STOP: Verdict.ROLLBACK},
    "stop": {Verdict.SKIP: Verdict.STOP, Verdict.ROLLBACK: Verdict.STOP},
}
"""Policy of the run file -> verdict of a monitor -> what is done, where that is something else."""

UNEQUAL = "unequal"
"""Key of the data of an event that copies of weights differ, with the differences. The states in memory may have been
taken after that happened, and the fault is of hardware or software: going back helps with neither."""
MOVED_FACTOR = 3.0
"""Of a bad batch or a hot learning rate all layers move; one that moves so much more than the median has a cause."""
FEWEST_COMPARED_LAYERS = 3
DONE = {
    Verdict.WARN: "the update is applied",
    Verdict.SKIP: "the update is not applied",
    Verdict.ROLLBACK: "the update is not applied, and the run is to go back",
    Verdict.STOP: "the update is not applied, and the run stops",
}


@dataclass(frozen=True)
class KeptState:
    """A state of the run in memory: all that training changes, what the loop counts and what the monitors remember."""

    state: TrainingState
    snapshot: Snapshot
    monitors: Mapping[str, Any]
    loss: float | None
    """Of the step that led to it; None before the first step of this process."""
    eval_loss: float | None
    """Where there was an evaluation after that step."""


@dataclass(frozen=True)
class Returned:
    """Where a run has gone back to.

    Attributes:
        source: of the state, for people.
        movement: how far every layer's weights had moved since that state, as a share of their norm; empty where that
            is not known.
    """

    state: TrainingState
    loss: float | None
    eval_loss: float | None
    source: str
    movement: Mapping[str, float] = field(default_factory=dict)


def moved_alone(movement: Mapping[str, float]) -> str | None:
    """Name the layer whose weights have moved far more than those of the others; None where none has."""
    shares = [share for share in movement.values() if share > 0]  # those of layers with weights of their own
    if len(shares) < FEWEST_COMPARED_LAYERS:
        return None
    layer = max(movement, key=movement.__getitem__)
    usual = statistics.median(shares)
    if not movement[layer] > MOVED_FACTOR * usual:
        return None
    return f"the weights of {layer} have moved most, by {movement[layer]:.2g} of their norm ({usual:.2g} is usual)"


class GoodStates:
    """Holds the newest state that proved good, and the one that is on trial; collective.

    A state is good once updates were applied after it and nobody objected to one of them.
    """

    def __init__(self, engine: TrainingEngine, monitors: Monitors, interval: int) -> None:
        self._engine = engine
        self._monitors = monitors
        self._interval = interval
        self._on_trial: KeptState | None = None
        self._spare: Snapshot | None = None
        self._sane_steps = 0
        self.good: KeptState | None = None

    def take(self, state: TrainingState, loss: float | None = None, eval_loss: float | None = None) -> float:
        """Copy the state as it is, on trial, and return the seconds that it took."""
        started = time.monotonic()
        snapshot = self._engine.snapshot(self._spare)
        self._spare = None
        self._on_trial = KeptState(state, snapshot, self._monitors.state_dict(), loss, eval_loss)
        self._sane_steps = 0
        return time.monotonic() - started

    def count_step(self, seen: Seen, eval_loss: float | None, is_sane: bool) -> float | None:
        """Take in how a step has ended, and return the seconds of a copy; None where none was due."""
        if not is_sane:
            self.drop_trial()
            return None
        # An overflow is how a loss scale finds its value, and a batch without labels is nothing: neither tells of harm,
        # and neither proves that there is none.
        if seen.result.skipped:
            return None
        self._sane_steps += 1
        if self._on_trial is not None and self._sane_steps >= CONFIRMED_AFTER_STEPS:
            if self.good is not None:
                self._spare = self.good.snapshot
            self.good = self._on_trial
            self._on_trial = None
        # Without a good state the run could not go back: a new trial begins at once.
        is_due = self.good is None or seen.state.step % self._interval == 0
        if self._on_trial is not None or not is_due:
            return None
        return self.take(seen.state, seen.result.loss, eval_loss)

    def drop_trial(self) -> None:
        """Forget the state on trial: harm was seen before it proved good."""
        if self._on_trial is not None:
            self._spare = self._on_trial.snapshot
        self._on_trial = None
        self._sane_steps = 0


class Guard:
    """Turns the verdicts of the monitors into deeds by the policy of the run file; the same on every rank."""

    def __init__(self, settings: StabilityConfig, engine: TrainingEngine, monitors: Monitors) -> None:
        self._settings = settings
        self._engine = engine
        self._monitors = monitors
        self._judgements: list[Judgement] = []
        self._states: GoodStates | None = None
        if settings.guard == "rollback":
            self._states = GoodStates(engine, monitors, settings.snapshot_interval)

    def begin(self, state: TrainingState) -> float | None:
        """Copy the state that the run starts from, and return the seconds; None where this policy wants no copy."""
        return None if self._states is None else self._states.take(state)

    def begin_step(self) -> None:
        """Forget the judgements of the step before."""
        self._judgements = []

    def judge(self, candidate: Candidate) -> bool:
        """Let the monitors judge a step, and answer whether its update is vetoed."""
        self._judgements = self._monitors.judge(candidate)
        return self._deed(self._judgements) >= Verdict.SKIP

    def events(self, seen: Seen) -> list[Event]:
        """Return an event for every judgement of the step, with what is done."""
        done = DONE.get(self._deed(self._judgements), "")
        return [seen.event(each.kind, f"{each.text}: {done}", **each.data) for each in self._judgements]

    def deed(self, events: list[Event]) -> Verdict:
        """Return what becomes of the step that the events are of, after its update was applied or not."""
        if any(UNEQUAL in event.data for event in events):
            return Verdict.STOP
        verdict = self._deed(self._judgements)
        if any(event.kind == STOP for event in events):
            verdict = max(verdict, DEEDS[self._settings.guard].get(Verdict.STOP, Verdict.STOP))
        return verdict

    def count_step(self, seen: Seen, eval_loss: float | None) -> float | None:
        """Take in how a step has ended, and copy the state where that is due; collective.

        Returns:
            The seconds of the copy; None where there was none.
        """
        if self._states is None:
            return None
        is_sane = not self._judgements and not self._monitors.suspects_harm
        return self._states.count_step(seen, eval_loss, is_sane)

    def why_not_back(self, state: TrainingState) -> str | None:
        """Say why the run cannot go back any more; None where it can."""
        window = self._settings.rollback_window_steps
        recent = [rollback for rollback in state.rollbacks if state.step - rollback.from_step < window]
        if len(recent) < self._settings.max_rollbacks:
            return None
        told = ", ".join(f"from step {each.from_step} to {each.to_step}" for each in recent)
        return f"it went back {len(recent)} times within {window} steps ({told}), and no further time helps"

    def go_back(self, state: TrainingState) -> Returned | None:
        """Restore the last good state in memory, past the samples since then; None where there is none. Collective.

        Args:
            state: at which the run goes back.
        """
        if self._states is None:
            return None
        # It is of the course that is left, wherever the run goes back to.
        self._states.drop_trial()
        good = self._states.good
        if good is None:
            return None
        movement = self._engine.movement_since(good.snapshot)
        self._engine.restore(good.snapshot)
        self._monitors.load_state_dict(good.monitors)
        return Returned(returned(good.state, state), good.loss, good.eval_loss, "its copy in memory", movement)

    def _deed(self, judgements: list[Judgement]) -> Verdict:
        deeds = DEEDS[self._settings.guard]
        return max((deeds.get(each.verdict, each.verdict) for each in judgements), default=Verdict.CONTINUE)


def returned(to: TrainingState, at: TrainingState) -> TrainingState:
    """Return the state ``to``, reached once more from ``at``, with the samples between left out."""
    rollback = Rollback(at.step, to.step, to.data_position, at.data_position)
    return replace(to, left_out_samples=at.data_position - to.consumed_samples, rollbacks=(*at.rollbacks, rollback))
