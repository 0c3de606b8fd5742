"""The global batch ramp: how many samples each step trains on, as a pure function of consumed samples.

Three forms, all in integer arithmetic (Megatron's float version can round a boundary down by one):

* linear over a total: ``start + increment * floor(consumed * n / ramp_samples)`` with
  ``n = (final - start) / increment`` (Megatron-LM's ``--rampup-batch-size``; BLOOM-176B: 192 16 9,765,625),
* linear per increment: ``start + increment * floor(consumed / samples_per_increment)``,
* a list of ``(from_sample, global_batch_size)`` steps.

A boundary takes effect on the first step that starts at or past it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Protocol

from megastable.core.errors import UserError


class BatchDivisionError(UserError):
    """Batches of a ramp that do not divide among replicas and micro-batches; ``faults`` has one line for each."""

    def __init__(self, faults: Sequence[str]) -> None:
        super().__init__("\n  ".join(["megastable.batch_rampup does not fit the layout:", *faults]))
        self.faults = tuple(faults)


class GlobalBatchSchedule(Protocol):
    """Maps consumed samples to a global batch size, and tells where the next size begins."""

    @property
    def final(self) -> int:
        """Global batch size (samples) at the end of the ramp, the largest."""
        ...

    def at(self, consumed_samples: int) -> int:
        """Global batch size (samples) of a step that starts at ``consumed_samples``."""
        ...

    def next_boundary(self, consumed_samples: int) -> int | None:
        """First sample position after ``consumed_samples`` with another size; None when the size is final."""
        ...


@dataclass(frozen=True)
class LinearRamp:
    """``increment`` more samples a step after every ``ramp_samples / num_increments`` consumed samples."""

    start: int
    increment: int
    final: int
    ramp_samples: int

    @property
    def num_increments(self) -> int:
        """Number of increments between ``start`` and ``final``."""
        return (self.final - self.start) // self.increment

    @classmethod
    def per_increment(cls, *, start: int, increment: int, final: int, samples_per_increment: int) -> LinearRamp:
        """The same ramp, given by the samples between two increments instead of by their total."""
        return cls(start, increment, final, samples_per_increment * ((final - start) // increment))

    def at(self, consumed_samples: int) -> int:
        """Global batch size (samples) of a step that starts at ``consumed_samples``."""
        increments = consumed_samples * self.num_increments // self.ramp_samples
        return min(self.start + self.increment * increments, self.final)

    def next_boundary(self, consumed_samples: int) -> int | None:
        """First sample position after ``consumed_samples`` with another size; None when the size is final."""
        size = self.at(consumed_samples)
        if size == self.final:
            return None
        next_increment = (size - self.start) // self.increment + 1
        return -(-next_increment * self.ramp_samples // self.num_increments)


@dataclass(frozen=True)
class StepRamp:
    """Sizes listed as ``(from_sample, global_batch_size)``, the first from sample 0. One entry is a constant batch."""

    steps: tuple[tuple[int, int], ...]

    @property
    def final(self) -> int:
        """Global batch size (samples) at the end of the ramp, the largest."""
        return self.steps[-1][1]

    def at(self, consumed_samples: int) -> int:
        """Global batch size (samples) of a step that starts at ``consumed_samples``."""
        return self.steps[self._index(consumed_samples)][1]

    def next_boundary(self, consumed_samples: int) -> int | None:
        """First sample position after ``consumed_samples`` with another size; None when the size is final."""
        index = self._index(consumed_samples) + 1
        return self.steps[index][0] if index < len(self.steps) else None

    def _index(self, consumed_samples: int) -> int:
        return bisect_right(self.steps, consumed_samples, key=lambda step: step[0]) - 1


def global_batch_sizes(schedule: GlobalBatchSchedule) -> list[int]:
    """Every size that the schedule has, in order, whether or not a step will start within its phase."""
    sizes, position = [schedule.at(0)], schedule.next_boundary(0)
    while position is not None:
        sizes.append(schedule.at(position))
        position = schedule.next_boundary(position)
    return list(dict.fromkeys(sizes))  # a step list may name a size twice in a row


@dataclass(frozen=True)
class Batch:
    """One step's split of the global batch. ``global = micro * num_microbatches * data_parallel_size``."""

    global_batch_size: int
    micro_batch_size: int
    num_microbatches: int


@dataclass(frozen=True)
class RampPhase:
    """A run of consecutive steps of the same batch."""

    first_step: int
    first_sample: int
    num_steps: int
    batch: Batch


@dataclass(frozen=True)
class BatchRampup:
    """The ramp of one run on one layout: what every step's batch is, known before step 0.

    ``micro_batch_size_steps`` lists ``(from_global_batch_size, micro_batch_size)``; below its first entry
    ``micro_batch_size`` holds.
    """

    schedule: GlobalBatchSchedule
    micro_batch_size: int
    data_parallel_size: int
    micro_batch_size_steps: tuple[tuple[int, int], ...] = ()

    def at(self, consumed_samples: int) -> Batch:
        """The batch of a step that starts at ``consumed_samples``."""
        global_batch_size = self.schedule.at(consumed_samples)
        micro_batch_size = self.micro_batch_size_for(global_batch_size)
        num_microbatches = global_batch_size // (micro_batch_size * self.data_parallel_size)
        return Batch(global_batch_size, micro_batch_size, num_microbatches)

    def micro_batch_size_for(self, global_batch_size: int) -> int:
        """Samples per micro-batch and replica at ``global_batch_size``."""
        index = bisect_right(self.micro_batch_size_steps, global_batch_size, key=lambda step: step[0])
        return self.micro_batch_size_steps[index - 1][1] if index else self.micro_batch_size

    def phases(self, *, total_samples: int | None = None, total_steps: int | None = None) -> list[RampPhase]:
        """Expand the ramp until ``total_samples`` are consumed or ``total_steps`` are done (exactly one is given).

        Steps are never cut: the last one may consume past ``total_samples``.

        Raises:
            BatchDivisionError: a global batch of the run does not divide by micro-batch size x data-parallel size; all
                such sizes are named with their legal neighbours.
        """
        phases: list[RampPhase] = []
        faults: list[str] = []
        step, consumed = 0, 0
        while (consumed < total_samples) if total_samples is not None else (step < (total_steps or 0)):
            batch = self.at(consumed)
            faults += self._division_fault(batch, consumed)
            steps_left = [] if total_steps is None else [total_steps - step]
            for end in (self.schedule.next_boundary(consumed), total_samples):
                if end is not None:
                    steps_left.append(-(-(end - consumed) // batch.global_batch_size))
            num_steps = min(steps_left)
            phases.append(RampPhase(step, consumed, num_steps, batch))
            step += num_steps
            consumed += num_steps * batch.global_batch_size
        if faults:
            raise BatchDivisionError(faults)
        return _merge_equal_neighbours(phases)

    def _division_fault(self, batch: Batch, consumed_samples: int) -> list[str]:
        size, unit = batch.global_batch_size, self._unit(batch.global_batch_size)
        if size % unit == 0:
            return []
        # One by one: the micro-batch size may change between the size and its neighbour.
        lower = next((near for near in range(size, 0, -1) if near % self._unit(near) == 0), None)
        upper = next(near for near in count(size) if near % self._unit(near) == 0)
        neighbours = f"{lower} or {upper}" if lower else f"{upper}"
        return [
            f"global batch {size} (from sample {consumed_samples:,}) is not a multiple of "
            f"micro-batch size {batch.micro_batch_size} x data-parallel size {self.data_parallel_size} = {unit}; "
            f"the nearest legal sizes are {neighbours}"
        ]

    def _unit(self, global_batch_size: int) -> int:
        return self.micro_batch_size_for(global_batch_size) * self.data_parallel_size


def _merge_equal_neighbours(phases: Sequence[RampPhase]) -> list[RampPhase]:
    """A step list may name the same size twice in a row; one phase is enough for it."""
    merged: list[RampPhase] = []
    for phase in phases:
        if merged and merged[-1].batch == phase.batch:
            last = merged.pop()
            phase = RampPhase(last.first_step, last.first_sample, last.num_steps + phase.num_steps, phase.batch)
        merged.append(phase)
    return merged


@dataclass(frozen=True)
class RunLength:
    """Steps and samples of a whole run, counted on the expanded ramp."""

    total_steps: int
    total_samples: int
    last_step_start: int
    """Samples consumed before the last step: where a schedule has to end for the last step to see its end value."""

    @classmethod
    def of(cls, phases: Sequence[RampPhase]) -> RunLength:
        """The length of the run that ``phases`` (not empty) expand to."""
        last = phases[-1]
        total_samples = last.first_sample + last.num_steps * last.batch.global_batch_size
        return cls(last.first_step + last.num_steps, total_samples, total_samples - last.batch.global_batch_size)
