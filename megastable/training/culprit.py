"""Finds out by what a step went wrong: the first value that is not finite, or the samples of a spike."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict

from megastable.core.batch_rampup import Batch
from megastable.core.records import Culprit, Event, TrainingState
from megastable.core.sample_ranges import next_ranges
from megastable.data import MicroBatch, Order, samples_at
from megastable.engine.training_engine import TrainingEngine
from megastable.monitors.monitor import Seen
from megastable.planning.run_plan import RunPlan

CULPRIT = "culprit"
"""The kind of the event that says by what a step went wrong."""
SPIKE = "spike"
MOST_TOLD = 3
"""Samples, or weights, that a message names."""

MicroBatchesOf = Callable[[Batch, int], Iterator[MicroBatch] | None]
"""Reads this rank's micro-batches of a step once more, from its batch and its first position in the order."""


class CulpritSearch:
    """Looks into the first step of every row of steps that went wrong; collective.

    A search costs a step or two. What goes wrong in the steps right after is most likely the same.
    """

    def __init__(self, plan: RunPlan, engine: TrainingEngine, order: Order, micro_batches_of: MicroBatchesOf) -> None:
        self._settings = plan.run.megastable
        self._fp16 = plan.run.fp16
        self._engine = engine
        self._order = order
        self._micro_batches_of = micro_batches_of
        self._is_spike_told = False
        self._is_break_told = False

    def events(self, before: TrainingState, seen: Seen, events: list[Event]) -> list[Event]:
        """Return an event that names the culprit of a step, where it went wrong.

        Args:
            before: the state that the step began in.
            events: what guard and monitors say of the step.
        """
        is_spike = any(event.kind == SPIKE for event in events)
        is_broken = self._is_broken(seen)
        # A loss that runs away spikes before it breaks, so that either has a row of its own. An overflow that the scale
        # may end is neither: it is not searched, and the row goes on.
        is_told = self._is_break_told if is_broken else self._is_spike_told
        self._is_spike_told = is_spike or (self._is_spike_told and seen.result.skipped)
        self._is_break_told = is_broken or (self._is_break_told and seen.result.skipped)
        if is_told or not (is_spike or is_broken):
            return []
        with self._engine.progress.at_length("looking for the culprit of a step"):
            micro_batches = self._micro_batches_of(seen.batch, before.data_position)
            samples = self._samples_of(before, seen.batch)
            if is_broken:
                return [self._first_not_finite(seen, samples, micro_batches)]
            return [self._by_their_loss(seen, samples, micro_batches)]

    def _is_broken(self, seen: Seen) -> bool:
        result = seen.result
        if not result.skipped or result.vetoed or not result.has_labels:
            return False
        # Gradients overflow while a dynamic loss scale finds its value; a loss is not scaled.
        return not (math.isfinite(result.loss) and self._fp16.can_fall(result.loss_scale))

    def _samples_of(self, before: TrainingState, batch: Batch) -> list[int]:
        ranges = next_ranges(before.data_position, batch.global_batch_size, self._settings.training.skip_samples)
        return samples_at(self._order, ranges)

    def _first_not_finite(self, seen: Seen, samples: list[int], micro_batches: Iterator[MicroBatch] | None) -> Event:
        culprit, weights = self._engine.find_culprit(micro_batches, seen.result.loss_scale)
        if culprit is None:
            told = f"; the gradients that were not finite are those of {_some(weights)}" if weights else ""
            text = (
                "the step was computed once more, and every value was finite: what was not has come and gone, as by "
                f"a fault of hardware or of software around the model{told}"
            )
            return seen.event(CULPRIT, text, origin="transient", weights=weights)
        own = [] if culprit.micro_batch is None else self._samples_of_micro_batch(culprit, seen.batch, samples)
        return seen.event(CULPRIT, _text_of(culprit, own), **asdict(culprit), samples=own)

    def _samples_of_micro_batch(self, culprit: Culprit, batch: Batch, samples: list[int]) -> list[int]:
        assert culprit.micro_batch is not None
        # As ``data.micro_batches`` deals them: a micro-batch to each replica in turn.
        dealt = culprit.micro_batch * self._engine.layout.data_parallel_size + culprit.replica
        return samples[dealt * batch.micro_batch_size : (dealt + 1) * batch.micro_batch_size]

    def _by_their_loss(self, seen: Seen, samples: list[int], micro_batches: Iterator[MicroBatch] | None) -> Event:
        losses = self._engine.sample_losses(micro_batches, seen.batch)
        ranked = sorted(zip(losses, samples, strict=True), reverse=True)
        told = ", ".join(f"sample {sample:,} with {loss:.4f}" for loss, sample in ranked[:MOST_TOLD])
        when = "" if seen.result.skipped else " after the update"
        text = f"by their own loss{when} the samples of the step rank: {told}"
        rest = [loss for loss, _ in ranked[MOST_TOLD:]]
        if rest:
            text += f"; the median of the others is {statistics.median(rest):.4f}"
        data = [{"sample": sample, "loss": loss} for loss, sample in ranked]
        return seen.event(CULPRIT, text, origin="samples", samples=data)


def _text_of(culprit: Culprit, samples: list[int]) -> str:
    rank = (
        f"on rank {culprit.rank} (stage {culprit.stage}, replica {culprit.replica}, tensor rank {culprit.tensor_rank})"
    )
    elements = f"{culprit.num_bad:,} of {culprit.num_elements:,} elements"
    name = f"{culprit.layer}.{culprit.module}" if culprit.module else culprit.layer
    if culprit.origin == "weights":
        return f"the weight {name} is itself not finite: {elements} {rank}"
    if culprit.micro_batch is None:
        return f"every gradient of a micro-batch is finite, and the {culprit.tensor} is not: {name}, {elements}, {rank}"
    of = f"micro-batch {culprit.micro_batch} (samples {', '.join(f'{sample:,}' for sample in samples)})"
    if culprit.origin == "data":
        return f"the data has {culprit.tensor}: {elements} of the {culprit.layer} of {of}, {rank}"
    return (
        f"the first value that is not finite is in the {culprit.origin} pass of {of}: {culprit.tensor} of {name}, "
        f"{elements}, {rank}"
    )


def _some(names: list[str]) -> str:
    told = ", ".join(names[:MOST_TOLD])
    return told if len(names) <= MOST_TOLD else f"{told} and {len(names) - MOST_TOLD:,} others"
