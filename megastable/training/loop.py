"""Runs the steps of a training run, one after the other, with all that belongs to a step."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import NoReturn

from megastable.core.batch_rampup import Batch
from megastable.core.errors import AskedToStopError, RunStoppedError
from megastable.core.records import Event, StepResult, TrainingState
from megastable.core.time_limit import TimeLimit
from megastable.data import BlendedCorpus, Corpus, MicroBatch, Order, has_tokens_to_learn, training_micro_batches
from megastable.engine.checkpoint import num_state_bytes
from megastable.engine.checkpoint_writer import SaveOutcome
from megastable.engine.process_group import stop_together
from megastable.engine.stop_request import StopRequest
from megastable.engine.training_engine import TrainingEngine
from megastable.monitors import Monitors
from megastable.monitors.monitor import STOP, Seen
from megastable.planning.run_plan import RunPlan
from megastable.training.evaluation import evaluate
from megastable.training.metrics import StepMetrics
from megastable.training.recorder import Recorder, SilentRecorder
from megastable.training.saving import Checkpoints

UNEQUAL_WEIGHTS = (
    "weights that should be equal are not, which is a fault of hardware or software and not of training; go on from "
    "the last checkpoint, on other devices:"
)

NOTHING_TO_LEARN = "nothing_to_learn"
"""The kind of the event that a global batch had prompts alone."""
NOTHING_TO_LEARN_TEXT = "the global batch has no token to learn from, only prompts: the step was skipped"

ASKED_TO_STOP = "asked_to_stop"
"""The kind of the event that somebody or the clock has asked the run to stop."""


def train_steps(
    plan: RunPlan,
    engine: TrainingEngine,
    corpus: Corpus | BlendedCorpus,
    state: TrainingState,
    recorder: Recorder | SilentRecorder,
    monitors: Monitors,
    checkpoints: Checkpoints,
    stop: StopRequest,
) -> float | None:
    """Run every step from ``state`` to the end of the plan. Collective.

    Returns:
        The last validation loss; None where no evaluation was made.

    Raises:
        RunStoppedError: a monitor or the consistency check stops the run, or another run has taken its folder over; on
            all ranks.
        AskedToStopError: a rank was asked to stop; on all ranks, after a save unless nothing is ever saved.
    """
    settings = plan.run.megastable
    order = corpus.order(settings.training.seed)
    limit = TimeLimit(settings.training.time_limit or math.inf, num_state_bytes(engine.model_state.partitions))
    last_eval_loss: float | None = None

    stop.begin_training()
    while state.step < plan.length.total_steps:
        engine.progress.begin_step(state.step + 1)
        started = time.monotonic()
        if limit.is_near(stop.elapsed_seconds):
            stop.ask(f"has no time for another step within megastable.training.time_limit = {limit.seconds:g} s")
        # Samples are the clock: all consumed ones of batch and data, those of applied updates of the learning rate. So
        # a skipped step moves on in the data and leaves the learning rate alone.
        batch = engine.rampup_hook.before_step(state.consumed_samples)
        learning_rate = plan.learning_rate(state.applied_samples, batch)
        # Only prompts leave a whole batch without a label that counts. The update would still move the weights, by
        # momentum and weight decay.
        is_nothing_to_learn = corpus.has_prompts and not has_tokens_to_learn(
            corpus.train, order, batch, state.consumed_samples
        )
        if is_nothing_to_learn:
            result = engine.skip_batch(stop.agree(), time.monotonic() - started)
        else:
            micro_batches = _training_data(plan, engine, corpus, order, batch, state.consumed_samples)
            watch = monitors.should_watch_next_step or _is_due(plan, state.step + 1, settings.monitors.interval)
            result = engine.train_batch(micro_batches, learning_rate, watch)
        state = state.advance(batch, result, settings.model.seq_length)

        # All that decides from here on is the same on every rank: they stop, evaluate and save together or not at all.
        seen = Seen(state, batch, learning_rate, result, corpus.samples_per_epoch)
        events = [seen.event(NOTHING_TO_LEARN, NOTHING_TO_LEARN_TEXT)]
        # What was not computed is no measurement.
        if not is_nothing_to_learn:
            events = monitors.observe(seen)
        consistency_seconds = None
        if _is_due(plan, state.step, settings.monitors.consistency_interval):
            differences, consistency_seconds = engine.check_consistency()
            if differences:
                events.append(_unequal_weights(seen, differences))

        # What a run does after its last step is not put off.
        is_last = state.step == plan.length.total_steps
        asked_to_stop = result.asked_to_stop and not is_last
        evaluation = None
        eval_is_due = _is_due(plan, state.step, settings.training.eval_interval) and len(corpus.validation) > 0
        # Whoever asks waits for a step and a save, and perhaps no longer.
        if eval_is_due and not asked_to_stop:
            evaluation = evaluate(plan, engine, corpus, batch)
            last_eval_loss = evaluation.loss

        stop_together(recorder.look_after_folder(state))
        recorder.record(
            StepMetrics.of(
                plan, state, batch, learning_rate, result, evaluation, monitors.values(), consistency_seconds
            )
        )
        for event in events:
            recorder.record_event(event)
        # Recorded first, so that files and terminal show why; not saved, since a resume would begin with these weights.
        _stop_on_stop_event(events, checkpoints)
        limit.count_round(time.monotonic() - started)
        save_is_due = is_save_due(plan, state.step)
        if save_is_due:
            checkpoints.save(state, result.loss, None if evaluation is None else evaluation.loss)
        for outcome in checkpoints.report():
            _take_in(outcome, limit, stop, settings.checkpoint.on_failure)
        if not asked_to_stop and not is_last and (save_is_due or evaluation is not None):
            asked_to_stop = stop.agree()  # these may have taken as long as many steps
        if asked_to_stop:
            _stop_as_asked(plan, state, result, recorder, stop.agreed_reason(), checkpoints)
    _finish(checkpoints)
    return last_eval_loss


def _take_in(outcome: SaveOutcome, limit: TimeLimit, stop: StopRequest, on_failure: str) -> None:
    """Let a save that has ended be counted, or end the run where the file wants that of one that failed."""
    if outcome.fault is None:
        limit.count_save(outcome.seconds)
    elif on_failure == "stop":
        stop.ask(f"could not save step {outcome.step}, and megastable.checkpoint.on_failure is 'stop'")


def _stop_as_asked(
    plan: RunPlan,
    state: TrainingState,
    result: StepResult,
    recorder: Recorder | SilentRecorder,
    reason: str,
    checkpoints: Checkpoints,
) -> NoReturn:
    """Save, unless this step has been or nothing ever is, and end the run.

    Raises:
        AskedToStopError: always.
    """
    stopped = f"the run stops at step {state.step}: {reason}"
    recorder.record_event(Event(state.step, state.consumed_samples, ASKED_TO_STOP, stopped, {"reason": reason}))
    if plan.run.megastable.checkpoint.save_interval is None:
        unsaved = "nothing was saved, since megastable.checkpoint.save_interval is null"
        raise AskedToStopError(f"{stopped}; {unsaved}", saved=False)
    if not is_save_due(plan, state.step):
        checkpoints.save(state, result.loss, eval_loss=None)
    outcome = checkpoints.finish()
    if outcome is None or outcome.fault is not None:
        raise AskedToStopError(f"{stopped}; this step could not be saved", saved=False)
    raise AskedToStopError(f"{stopped}; --resume goes on from {outcome.folder}", saved=True)


def _finish(checkpoints: Checkpoints) -> None:
    """Wait for the save of the last step.

    Raises:
        RunStoppedError: it failed; a run whose result is lost has not ended well.
    """
    outcome = checkpoints.finish()
    if outcome is not None and outcome.fault is not None:
        raise RunStoppedError(f"the run is at its end and could not save step {outcome.step}: {outcome.fault}")


def _stop_on_stop_event(events: list[Event], checkpoints: Checkpoints) -> None:
    """End the run where an event says so, once a save of an earlier step that is under way has ended.

    Raises:
        RunStoppedError: with the event's text.
    """
    for event in events:
        if event.kind == STOP:
            checkpoints.finish()
            raise RunStoppedError(f"the run stops at step {event.step}: {event.text}")


def _training_data(
    plan: RunPlan,
    engine: TrainingEngine,
    corpus: Corpus | BlendedCorpus,
    order: Order,
    batch: Batch,
    consumed_samples: int,
) -> Iterator[MicroBatch] | None:
    """Return this rank's micro-batches of a step; None on ranks of the stages between the first and the last."""
    if not engine.needs_data:
        return None
    replicas = plan.layout.data_parallel_size
    return training_micro_batches(corpus.train, order, batch, consumed_samples, engine.replica, replicas)


def _unequal_weights(seen: Seen, differences: list[str]) -> Event:
    lines = "".join(f"\n  {line}" for line in differences)
    return seen.event(STOP, UNEQUAL_WEIGHTS + lines)


def is_save_due(plan: RunPlan, step: int) -> bool:
    """Tell whether a checkpoint is due at the end of ``step``: every ``save_interval`` steps, and at the last."""
    interval = plan.run.megastable.checkpoint.save_interval
    if interval is None:
        return False
    return step == plan.length.total_steps or _is_due(plan, step, interval)


def _is_due(plan: RunPlan, step: int, interval: int) -> bool:
    """Tell whether something is due at the end of ``step``: every ``interval`` steps and at the last; never for 0."""
    is_last = step == plan.length.total_steps
    return interval > 0 and (step % interval == 0 or is_last)
