"""The training loop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from megastable.core.batch_rampup import Batch
from megastable.core.errors import RunStoppedError
from megastable.core.records import Event, TrainingState
from megastable.data import (
    Corpus,
    SampleOrder,
    evaluation_micro_batches,
    num_evaluation_micro_batches,
    training_micro_batches,
)
from megastable.engine.training_engine import TrainingEngine
from megastable.monitors import Monitors
from megastable.monitors.monitor import STOP, Seen
from megastable.planning.run_plan import RunPlan
from megastable.training.metrics import StepMetrics
from megastable.training.recorder import Recorder, SilentRecorder

UNEQUAL_WEIGHTS = (
    "weights that should be equal are not, which is a fault of hardware or software and not of training; go on from "
    "the last checkpoint, on other devices:"
)


def train_steps(
    plan: RunPlan,
    engine: TrainingEngine,
    corpus: Corpus,
    state: TrainingState,
    recorder: Recorder | SilentRecorder,
    monitors: Monitors,
    save: Callable[[TrainingState], Path],
) -> float | None:
    """Run every step from ``state`` to the end of the plan. Collective.

    Returns:
        The last validation loss; None where no evaluation was made.

    Raises:
        RunStoppedError: a monitor or the consistency check stops the run; on all ranks.
    """
    settings, last_eval_loss = plan.run.megastable, None
    order = SampleOrder(len(corpus.train), settings.training.seed)
    while state.step < plan.length.total_steps:
        batch = engine.rampup_hook.before_step(state.consumed_samples)
        lr = plan.learning_rate(state.applied_samples, batch)
        micro_batches = (
            training_micro_batches(
                corpus.train, order, batch, state.consumed_samples, engine.replica, plan.layout.data_parallel_size
            )
            if engine.needs_data
            else None
        )
        is_last = state.step + 1 == plan.length.total_steps
        watch = monitors.want_a_look or _is_due(state.step + 1, settings.monitors.interval, is_last)
        result = engine.train_batch(micro_batches, lr, watch)
        state = state.advance(batch, result, settings.model.seq_length)
        seen = Seen(state, batch, result)
        events, consistency_seconds = monitors.observe(seen), None
        if _is_due(state.step, settings.monitors.consistency_interval, is_last):
            differences, consistency_seconds = engine.check_consistency()
            if differences:
                events.append(seen.event(STOP, UNEQUAL_WEIGHTS + "".join(f"\n  {line}" for line in differences)))

        evaluate_now = _is_due(state.step, settings.training.eval_interval, is_last) and len(corpus.validation) > 0
        eval_loss = evaluate(plan, engine, corpus, batch) if evaluate_now else None
        last_eval_loss = last_eval_loss if eval_loss is None else eval_loss
        metrics = StepMetrics.of(plan, state, batch, lr, result, eval_loss, monitors.values(), consistency_seconds)
        recorder.record(metrics)
        for event in events:
            recorder.happened(event)
        stop_if_told(events)
        if _is_due(state.step, settings.checkpoint.save_interval, is_last):
            recorder.note(f"saved {save(state)}")
    return last_eval_loss


def stop_if_told(events: list[Event]) -> None:
    """End the run where an event says so.

    Raises:
        RunStoppedError: with the event's text.
    """
    for event in events:
        if event.kind == STOP:
            raise RunStoppedError(f"the run stops at step {event.step}: {event.text}")


def evaluate(plan: RunPlan, engine: TrainingEngine, corpus: Corpus, batch: Batch) -> float:
    """Token mean of the validation loss, in micro-batches of the current size. Collective."""
    size, most, replicas = (
        batch.micro_batch_size,
        plan.run.megastable.training.eval_samples,
        plan.layout.data_parallel_size,
    )
    data = (
        evaluation_micro_batches(corpus.validation, size, most, engine.replica, replicas) if engine.needs_data else None
    )
    return engine.evaluate(data, num_evaluation_micro_batches(corpus.validation, size, most, replicas))


def _is_due(step: int, interval: int, is_last: bool) -> bool:
    return interval > 0 and (step % interval == 0 or is_last)
