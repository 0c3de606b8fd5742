"""Runs the steps of a training run, one after the other, with all that belongs to a step."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import NoReturn

from megastable.core.batch_rampup import Batch
from megastable.core.errors import AskedToStopError, RunStoppedError
from megastable.core.records import Event, StepResult, TrainingState, Verdict
from megastable.core.run_paths import RunPaths
from megastable.core.sample_ranges import next_ranges
from megastable.core.time_limit import TimeLimit
from megastable.data import BlendedCorpus, Corpus, MicroBatch, has_tokens_to_learn, training_micro_batches
from megastable.engine.checkpoint import num_state_bytes
from megastable.engine.checkpoint_writer import SaveOutcome
from megastable.engine.process_group import stop_together
from megastable.engine.stop_request import StopRequest
from megastable.engine.training_engine import TrainingEngine
from megastable.monitors import Monitors
from megastable.monitors.monitor import STOP, Seen
from megastable.planning.run_plan import RunPlan
from megastable.training.culprit import CULPRIT, CulpritSearch
from megastable.training.evaluation import evaluate
from megastable.training.metrics import Evaluation, StepMetrics
from megastable.training.recorder import Recorder, SilentRecorder
from megastable.training.recovery import UNEQUAL, Guard, Returned, moved_alone, returned
from megastable.training.saving import Checkpoints

UNEQUAL_WEIGHTS = (
    "weights that should be equal are not, which is a fault of hardware or software and not of training; go on from "
    "the last checkpoint, on other devices:"
)

REASONS_TO_LEAVE = ("spike", "fall", "repeat", "divergence", STOP, CULPRIT)
"""Kinds of events after which a run may stop or go back."""
NOTHING_TO_LEARN = "nothing_to_learn"
"""The kind of the event that a global batch had prompts alone."""
NOTHING_TO_LEARN_TEXT = "the global batch has no token to learn from, only prompts: the step was skipped"
ASKED_TO_STOP = "asked_to_stop"
"""The kind of the event that somebody or the clock has asked the run to stop."""


class TrainingLoop:
    """Takes the steps of a run on this rank; every method is collective.

    Args:
        paths: where the files are looked for that stop the run or let it save.
    """

    def __init__(
        self,
        plan: RunPlan,
        engine: TrainingEngine,
        corpus: Corpus | BlendedCorpus,
        recorder: Recorder | SilentRecorder,
        monitors: Monitors,
        checkpoints: Checkpoints,
        stop: StopRequest,
        paths: RunPaths,
    ) -> None:
        self._plan = plan
        self._settings = plan.run.megastable
        self._engine = engine
        self._corpus = corpus
        self._order = corpus.order(self._settings.training.seed)
        self._recorder = recorder
        self._monitors = monitors
        self._culprits = CulpritSearch(plan, engine, self._order, self._training_data)
        self._guard = Guard(self._settings.stability, engine, monitors)
        self._checkpoints = checkpoints
        self._stop = stop
        self._paths = paths
        state_bytes = num_state_bytes(engine.model_state.partitions)
        self._limit = TimeLimit(self._settings.training.time_limit or math.inf, state_bytes)
        self._last_eval_loss: float | None = None
        self._snapshot_seconds: float | None = None

    def run(self, state: TrainingState) -> float | None:
        """Take every step from ``state`` to the end of the plan.

        Returns:
            The last validation loss; None where no evaluation was made.

        Raises:
            RunStoppedError: a monitor or the consistency check stops the run, or another run has taken its folder over;
                on all ranks.
            AskedToStopError: a rank was asked to stop; on all ranks, after a save unless nothing is ever saved.
        """
        self._begin(state)
        while state.step < self._plan.length.total_steps:
            started = time.monotonic()
            seen = self._take_step(state)
            # All that decides from here on is the same on every rank: they stop, evaluate and save together or not at
            # all.
            events = self._events_of(seen)
            evaluation = self._look_after(seen, events)
            events += self._search_culprit(state, seen, events)
            # Recorded by now, so that files and terminal show why; not saved, since a resume would begin with these
            # weights.
            deed = self._guard.deed(events)
            if deed is Verdict.STOP:
                self._end(seen, events)
            if deed is Verdict.ROLLBACK:
                state = self._go_back(seen, events)
                continue
            state = seen.state
            self._snapshot_seconds = self._guard.count_step(seen, _loss_of(evaluation))
            self._limit.count_round(time.monotonic() - started)
            self._save_and_stop(seen, evaluation)
        self._finish()
        return self._last_eval_loss

    def _begin(self, state: TrainingState) -> None:
        self._snapshot_seconds = self._guard.begin(state)
        if self._snapshot_seconds is not None:
            self._recorder.note(f"a copy of the state to go back to took {self._snapshot_seconds:.3g} s")
        for switch in (self._paths.stop_switch, self._paths.save_switch):
            if self._recorder.take_switch(switch):
                self._recorder.note(f"removed the file {switch}, which was there before the run began")
        self._stop.begin_training()

    def _take_step(self, state: TrainingState) -> Seen:
        """Take the step after ``state``, and return it as monitors see it."""
        started = time.monotonic()
        engine = self._engine
        engine.progress.begin_step(state.step + 1)
        if self._limit.is_near(self._stop.elapsed_seconds):
            limit = f"megastable.training.time_limit = {self._limit.seconds:g} s"
            self._stop.ask(f"has no time for another step within {limit}")
        if self._recorder.take_switch(self._paths.stop_switch):
            self._stop.ask(f"found the file {self._paths.stop_switch}")
        # Samples are the clock: all consumed ones of the batch, those of applied updates of the learning rate. So a
        # skipped step moves on in the data and leaves the learning rate alone.
        batch = engine.rampup_hook.before_step(state.consumed_samples)
        learning_rate = self._plan.learning_rate(state.applied_samples, batch)
        self._guard.begin_step()
        samples = next_ranges(state.data_position, batch.global_batch_size, self._settings.training.skip_samples)
        # Only prompts leave a whole batch without a label that counts. The update would still move the weights, by
        # momentum and weight decay.
        if self._corpus.has_prompts and not has_tokens_to_learn(self._corpus.train, self._order, samples):
            result = engine.skip_batch(self._stop.agree(), time.monotonic() - started)
        else:
            result = self._train_batch(state, batch, learning_rate)
        left_out = samples[-1][1] - state.data_position - batch.global_batch_size
        state = state.advance(batch, result, self._settings.model.seq_length, left_out)
        return Seen(state, batch, learning_rate, result, self._corpus.samples_per_epoch)

    def _train_batch(self, state: TrainingState, batch: Batch, learning_rate: float) -> StepResult:
        """Compute the step after ``state``, and apply its update unless the guard vetoes it."""
        watch = self._monitors.should_watch_next_step or self._is_due(state.step + 1, self._settings.monitors.interval)
        asks_to_save = self._recorder.take_switch(self._paths.save_switch)
        micro_batches = self._training_data(batch, state.data_position)
        return self._engine.train_batch(micro_batches, learning_rate, watch, self._guard.judge, asks_to_save)

    def _events_of(self, seen: Seen) -> list[Event]:
        """Return what guard and monitors have to say of a step."""
        # What was not computed is no measurement.
        if not seen.result.has_labels:
            return [seen.event(NOTHING_TO_LEARN, NOTHING_TO_LEARN_TEXT)]
        return [*self._guard.events(seen), *self._monitors.observe(seen)]

    def _look_after(self, seen: Seen, events: list[Event]) -> Evaluation | None:
        """Compare copies of weights and evaluate where that is due, and record the step with its events."""
        consistency_seconds = None
        if self._is_due(seen.state.step, self._settings.monitors.consistency_interval):
            differences, consistency_seconds = self._engine.check_consistency()
            if differences:
                events.append(_unequal_weights(seen, differences))
        evaluation = None
        has_text = len(self._corpus.validation) > 0
        eval_is_due = has_text and self._is_due(seen.state.step, self._settings.training.eval_interval)
        # Whoever asks waits for a step and a save, and perhaps no longer.
        if eval_is_due and not self._is_asked_to_stop(seen):
            evaluation = evaluate(self._plan, self._engine, self._corpus, seen.batch)
            self._last_eval_loss = evaluation.loss
        stop_together(self._recorder.look_after_folder(seen.state))
        self._recorder.record(
            StepMetrics.of(
                self._plan, seen.state, seen.batch, seen.learning_rate, seen.result, evaluation,
                self._monitors.values(), consistency_seconds, self._snapshot_seconds,
            )
        )  # fmt: skip
        for event in events:
            self._recorder.record_event(event)
        return evaluation

    def _search_culprit(self, before: TrainingState, seen: Seen, events: list[Event]) -> list[Event]:
        """Find out by what a step went wrong, where it did, and record it."""
        if self._is_asked_to_stop(seen):  # a search takes as long as a step or two
            return []
        found = self._culprits.events(before, seen, events)
        for event in found:
            self._recorder.record_event(event)
        return found

    def _save_and_stop(self, seen: Seen, evaluation: Evaluation | None) -> None:
        """Save where that is due, and stop where a rank was asked to.

        Raises:
            AskedToStopError: after the save.
        """
        save_is_due = self._is_save_due(seen)
        if save_is_due:
            self._checkpoints.save(seen.state, seen.result.loss, _loss_of(evaluation))
        for outcome in self._checkpoints.report():
            self._take_in(outcome)
        asked_to_stop = self._is_asked_to_stop(seen)
        if not asked_to_stop and not self._is_last(seen.state.step) and (save_is_due or evaluation is not None):
            asked_to_stop = self._stop.agree()  # these may have taken as long as many steps
        if asked_to_stop:
            self._stop_as_asked(seen, self._stop.agreed_reason())

    def _take_in(self, outcome: SaveOutcome) -> None:
        """Let a save that has ended be counted, or end the run where the file wants that of one that failed."""
        if outcome.fault is None:
            self._limit.count_save(outcome.seconds)
        elif self._settings.checkpoint.on_failure == "stop":
            self._stop.ask(f"could not save step {outcome.step}, and megastable.checkpoint.on_failure is 'stop'")

    def _stop_as_asked(self, seen: Seen, reason: str) -> NoReturn:
        """Save, unless this step has been or nothing ever is, and end the run.

        Raises:
            AskedToStopError: always.
        """
        stopped = f"the run stops at step {seen.state.step}: {reason}"
        self._recorder.record_event(seen.event(ASKED_TO_STOP, stopped, reason=reason))
        if self._settings.checkpoint.save_interval is None and not seen.result.asked_to_save:
            self._checkpoints.finish()
            unsaved = "nothing was saved, since megastable.checkpoint.save_interval is null"
            raise AskedToStopError(f"{stopped}; {unsaved}", saved=False)
        if not self._is_save_due(seen):
            self._checkpoints.save(seen.state, seen.result.loss, eval_loss=None)
        self._checkpoints.finish()
        how_to_go_on = self._checkpoints.how_to_go_on()
        if how_to_go_on is None:
            raise AskedToStopError(f"{stopped}; this step could not be saved", saved=False)
        raise AskedToStopError(f"{stopped}; {how_to_go_on}", saved=True)

    def _finish(self) -> None:
        """Wait for the save of the last step.

        Raises:
            RunStoppedError: it failed; a run whose result is lost has not ended well.
        """
        self._checkpoints.finish()
        outcome = self._checkpoints.last
        if outcome is not None and outcome.fault is not None:
            raise RunStoppedError(f"the run is at its end and could not save step {outcome.step}: {outcome.fault}")

    def _end(self, seen: Seen, events: list[Event], further: str = "") -> NoReturn:
        """End the run for what its events say, once a save of an earlier step that is under way has ended.

        Raises:
            RunStoppedError: always.
        """
        self._checkpoints.finish()
        texts = "; ".join(event.text for event in events if event.kind in REASONS_TO_LEAVE)
        raise RunStoppedError(f"the run stops at step {seen.state.step}: {texts}{further}")

    def _go_back(self, seen: Seen, events: list[Event]) -> TrainingState:
        """Return to the last good state, in memory or of a checkpoint, and save it as it is gone on from.

        Raises:
            RunStoppedError: there is none, or the run has gone back too often.
        """
        why_not = self._guard.why_not_back(seen.state)
        if why_not is not None:
            self._end(seen, events, f"; {why_not}")
        for outcome in self._checkpoints.finish():
            self._take_in(outcome)
        back = self._guard.go_back(seen.state) or self._load_newest(seen)
        if back is None:
            self._end(seen, events, "; there is no state to go back to, in memory or on the disk")
        state = back.state
        fault = self._checkpoints.abandon_after(state.step)
        with self._engine.progress.at_length("going back"):
            self._recorder.go_back(state)
        reasons = "; ".join(event.text for event in events if event.kind in REASONS_TO_LEAVE)
        self._recorder.record_event(_event_of_return(back, reasons))
        moved = moved_alone(back.movement)
        if moved is not None:
            text = f"from step {state.step} to {seen.state.step} {moved}: look there for the cause"
            self._recorder.record_event(Event(state.step, state.consumed_samples, "moved", text, dict(back.movement)))
        if fault is not None:
            text = f"a resume may go on from what the run has gone back from: {fault}"
            self._recorder.record_event(Event(state.step, state.consumed_samples, "warning", text, {}))
        if self._settings.checkpoint.save_interval is not None or seen.result.asked_to_save:
            # A resume has to know which samples are left out.
            self._checkpoints.save(state, back.loss, back.eval_loss)
        return state

    def _load_newest(self, seen: Seen) -> Returned | None:
        """Go back to the newest whole checkpoint; None where there is none."""
        manifest = self._checkpoints.load_newest(self._engine.model_state, self._plan, seen.state.step)
        if manifest is None:
            return None
        state = returned(manifest.state.to_training_state(), seen.state)
        self._snapshot_seconds = self._guard.begin(state)
        return Returned(state, manifest.loss, manifest.eval_loss, "its checkpoint")

    def _training_data(self, batch: Batch, position: int) -> Iterator[MicroBatch] | None:
        """Return this rank's micro-batches of a step; None on ranks that need none."""
        if not self._engine.needs_data:
            return None
        replicas = self._plan.layout.data_parallel_size
        left_out = self._settings.training.skip_samples
        return training_micro_batches(
            self._corpus.train, self._order, batch, position, self._engine.replica, replicas, left_out
        )

    def _is_last(self, step: int) -> bool:
        return step == self._plan.length.total_steps

    def _is_asked_to_stop(self, seen: Seen) -> bool:
        # What a run does after its last step is not put off.
        return seen.result.asked_to_stop and not self._is_last(seen.state.step)

    def _is_save_due(self, seen: Seen) -> bool:
        """Tell whether a save is due at the end of a step: every ``save_interval`` steps, at the last, where asked."""
        interval = self._settings.checkpoint.save_interval
        if interval is None:
            return seen.result.asked_to_save
        step = seen.state.step
        return self._is_last(step) or self._is_due(step, interval) or seen.result.asked_to_save

    def _is_due(self, step: int, interval: int) -> bool:
        """Tell whether a thing is due at the end of ``step``: every ``interval`` steps and at the last; never for 0."""
        return interval > 0 and (step % interval == 0 or self._is_last(step))


def _event_of_return(back: Returned, reasons: str) -> Event:
    state = back.state
    rollback = state.rollbacks[-1]
    text = (
        f"from step {rollback.from_step}, where {reasons}, to step {state.step}, from {back.source}; samples "
        f"{rollback.first_sample:,} to {rollback.next_sample - 1:,} of the order are left out"
    )
    return Event(state.step, state.consumed_samples, "rollback", text, asdict(rollback))


def _loss_of(evaluation: Evaluation | None) -> float | None:
    return None if evaluation is None else evaluation.loss


def _unequal_weights(seen: Seen, differences: list[str]) -> Event:
    lines = "".join(f"\n  {line}" for line in differences)
    return seen.event(STOP, UNEQUAL_WEIGHTS + lines, **{UNEQUAL: differences})
