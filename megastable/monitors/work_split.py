"""Monitors of how the work is split.

The samples are split over epochs and steps, a step over micro-batches by the batch ramp, the layers over the stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megastable.core.partition import imbalance
from megastable.core.records import Event
from megastable.core.sample_ranges import num_taken
from megastable.monitors.monitor import Monitor, PlannedRun, Seen

LARGEST_EXCESS = 0.5
"""By how much the measured imbalance may exceed the predicted one: the slowest stage, whose pace is the pipeline's,
takes half a mean stage longer than it should. One step on shared cores was seen to be off by 0.23, and a count of
operations knows nothing of caches and clocks."""


class RampSteps(Monitor):
    """Reports where the global batch or its split into micro-batches changes."""

    def __init__(self, plan: PlannedRun) -> None:
        super().__init__(plan)
        self._last: list[int] | None = None
        """Global batch, micro-batch size and number of micro-batches of the step before.

        A list, as JSON gives it back from a checkpoint: a tuple would not equal it.
        """

    def observe(self, seen: Seen) -> Iterator[Event]:
        """Yield an event where the batch is not that of the step before."""
        batch = seen.batch
        now = [batch.global_batch_size, batch.micro_batch_size, batch.num_microbatches]
        # The first step of a run has nothing to be compared with.
        if self._last is not None and now != self._last:
            yield seen.event(
                "ramp",
                f"global batch {self._last[0]} -> {batch.global_batch_size}: {batch.num_microbatches} micro-batches of "
                f"{batch.micro_batch_size} a replica",
                global_batch_size=batch.global_batch_size,
                micro_batch_size=batch.micro_batch_size,
                num_microbatches=batch.num_microbatches,
            )
        self._last = now

    def state_dict(self) -> dict[str, Any]:
        """Return the last batch."""
        return {"last": self._last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from the last batch, so that a ramp step right after a resume is an event as well."""
        self._last = state["last"]


class Epochs(Monitor):
    """Measures how often the training samples were read, and reports where an epoch ends.

    The epoch follows from the position in the order of the samples. Which ones have ended is remembered, since an end
    may lie among samples that are left out, and so between two steps.
    """

    metric_names = ("epoch",)
    is_of_the_text = True

    def __init__(self, plan: PlannedRun) -> None:
        super().__init__(plan)
        self._epoch: float | None = None
        self._completed: int | None = None

    def observe(self, seen: Seen) -> Iterator[Event]:
        """Yield an event at the step that reads the last sample of an epoch, or the first one after its end."""
        samples = seen.samples_per_epoch
        if samples is None:
            return
        position = seen.state.data_position
        batch_samples = seen.batch.global_batch_size
        before = self._completed
        if before is None:
            before = 0 if seen.state.step == 1 else (position - batch_samples) // samples
        self._epoch = position / samples
        completed = position // samples
        self._completed = completed
        if completed == before:
            return
        left_out = self.plan.run.megastable.training.skip_samples
        # Those before the step are not its own, such as what a rollback has passed over.
        of_next = min(batch_samples, num_taken(completed * samples, position, left_out))
        text = f"epoch {completed} is complete: each of the {samples:,} training samples was read {completed} times"
        if seen.state.left_out_samples:
            text += f", but for {seen.state.left_out_samples:,} that were left out"
        if of_next:
            # The order is another in every epoch, so that these may be among the step's first samples as well.
            text += f"; the last {of_next:,} of this step are of epoch {completed + 1}"
        yield seen.event("epoch", text, completed=completed, samples_of_next=of_next)

    def values(self) -> Mapping[str, float]:
        """Return the epochs read so far, such as 1.25."""
        return {} if self._epoch is None else {"epoch": self._epoch}

    def state_dict(self) -> dict[str, Any]:
        """Return the number of epochs that have ended."""
        return {"completed": self._completed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from the epochs that have ended; an earlier version did not count them."""
        self._completed = state.get("completed")


class StageBalance(Monitor):
    """Reports once a run how much longer than the mean the slowest stage took, beside what was predicted.

    It does so at the first watched step that is not the first of its process, in which caches and allocators warm up.
    """

    def __init__(self, plan: PlannedRun) -> None:
        super().__init__(plan)
        self._reported = plan.layout.num_stages == 1  # a single stage has no balance
        self._is_warm = False

    def observe(self, seen: Seen) -> Iterator[Event]:
        """Yield measured and predicted imbalance, and a warning where the stages are far less equal."""
        is_warm = self._is_warm
        self._is_warm = True
        watched = seen.result.watched
        if self._reported or watched is None or not is_warm:
            return
        self._reported = True
        predicted = self.plan.cut.imbalance
        busy = list(watched.stage_busy_seconds.values())  # in the order of the stages
        measured = imbalance(busy)
        slowest = busy.index(max(busy))
        text = (
            f"the stages are {measured:.1%} out of balance (predicted {predicted:.1%}): stage {slowest} computed "
            f"{busy[slowest]:.3g} s of this step, the mean is {sum(busy) / len(busy):.3g} s"
        )
        data = {"measured": measured, "predicted": predicted, "slowest_stage": slowest}
        yield seen.event("stage_balance", text, **data)
        # Blocks cannot be cut in two, so that some imbalance is predicted for most models: only the excess is a fault.
        if measured > predicted + LARGEST_EXCESS:
            advice = (
                "look whether its devices are slower or shared; if not, move blocks with megastable.pipeline.partition"
            )
            yield seen.event("warning", f"stage {slowest} takes far longer than predicted: {advice}", **data)

    def state_dict(self) -> dict[str, Any]:
        """Return whether the balance was reported. Warmth is not kept: a resumed process has to warm up again."""
        return {"reported": self._reported}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on without a second report."""
        # Checkpoints that were written before this name was chosen say "told" and still have to load.
        self._reported = state["told"] if "told" in state else state["reported"]
