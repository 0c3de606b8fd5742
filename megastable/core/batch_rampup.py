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
from itertools import pairwise
from typing import Protocol

from megastable.core.errors import UserError

SHOWN_FAULTS = 20
"""Sizes that do not divide and are named; a ramp may have thousands."""


class BatchDivisionError(UserError):
    """Batches of a ramp that do not divide among replicas and micro-batches; ``faults`` has a line for each named."""

    def __init__(self, faults: Sequence[str]) -> None:
        super().__init__("\n  ".join(["megastable.batch_rampup does not fit the layout:", *faults]))
        self.faults = tuple(faults)


class GlobalBatchSchedule(Protocol):
    """Maps consumed samples to a global batch size, and says where the next size begins."""

    @property
    def final(self) -> int:
        """Return the global batch size (samples) at the end of the ramp, the largest."""
        ...

    def at(self, consumed_samples: int) -> int:
        """Return the global batch size (samples) of a step that starts at ``consumed_samples``."""
        ...

    def next_boundary(self, consumed_samples: int) -> int | None:
        """Return the first sample position after ``consumed_samples`` with another size; None at the final size."""
        ...


@dataclass(frozen=True)
class LinearRamp:
    """Adds ``increment`` samples to a step after every ``ramp_samples / num_increments`` consumed samples."""

    start: int
    increment: int
    final: int
    ramp_samples: int

    @property
    def num_increments(self) -> int:
        """Count the increments between ``start`` and ``final``."""
        return (self.final - self.start) // self.increment

    @classmethod
    def per_increment(cls, *, start: int, increment: int, final: int, samples_per_increment: int) -> LinearRamp:
        """Make the ramp from the samples between two increments instead of their total.

        Confusing the two readings makes a ramp ``num_increments`` times too long or too short, so they are never given
        by the same name.
        """
        return cls(start, increment, final, samples_per_increment * ((final - start) // increment))

    def at(self, consumed_samples: int) -> int:
        """Return the global batch size (samples) of a step that starts at ``consumed_samples``."""
        # Multiplied before it is divided: ramp_samples / num_increments need not be whole, and a rounded quotient would
        # move every later boundary.
        increments = consumed_samples * self.num_increments // self.ramp_samples
        return min(self.start + self.increment * increments, self.final)

    def next_boundary(self, consumed_samples: int) -> int | None:
        """Return the first sample position after ``consumed_samples`` with another size; None at the final size."""
        size = self.at(consumed_samples)
        if size == self.final:
            return None
        next_increment = (size - self.start) // self.increment + 1
        # Rounded up, to the first whole sample for which `at` gives the next size.
        return -(-next_increment * self.ramp_samples // self.num_increments)


@dataclass(frozen=True)
class StepRamp:
    """Lists sizes as ``(from_sample, global_batch_size)``, the first from sample 0; one entry is a constant batch."""

    steps: tuple[tuple[int, int], ...]

    @property
    def final(self) -> int:
        """Return the global batch size (samples) at the end of the ramp, the largest."""
        return self.steps[-1][1]

    def at(self, consumed_samples: int) -> int:
        """Return the global batch size (samples) of a step that starts at ``consumed_samples``."""
        return self.steps[self._index(consumed_samples)][1]

    def next_boundary(self, consumed_samples: int) -> int | None:
        """Return the first sample position after ``consumed_samples`` with another size; None at the final size."""
        following = self.steps[self._index(consumed_samples) + 1 :]
        return following[0][0] if following else None

    def _index(self, consumed_samples: int) -> int:
        # From the right: a step that starts at a boundary already has the size after it.
        return bisect_right(self.steps, consumed_samples, key=lambda step: step[0]) - 1


def global_batch_sizes(schedule: GlobalBatchSchedule, first_sample: int = 0) -> list[int]:
    """List every size that the schedule has from a sample on, in order, whether or not a step starts in its phase."""
    sizes = [schedule.at(first_sample)]
    position = schedule.next_boundary(first_sample)
    while position is not None:
        sizes.append(schedule.at(position))
        position = schedule.next_boundary(position)
    # A step list may name a size twice in a row.
    return list(dict.fromkeys(sizes))


@dataclass(frozen=True)
class Batch:
    """How one step splits the global batch: ``global = micro * num_microbatches * data_parallel_size``."""

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
    """The ramp of one run on one layout: what every step's batch is, known before the first.

    ``micro_batch_size_steps`` lists ``(from_global_batch_size, micro_batch_size)``; below its first entry
    ``micro_batch_size`` holds.
    """

    schedule: GlobalBatchSchedule
    micro_batch_size: int
    data_parallel_size: int
    micro_batch_size_steps: tuple[tuple[int, int], ...] = ()

    def at(self, consumed_samples: int) -> Batch:
        """Return the batch of a step that starts at ``consumed_samples``."""
        global_batch_size = self.schedule.at(consumed_samples)
        micro_batch_size = self.micro_batch_size_for(global_batch_size)
        num_microbatches = global_batch_size // (micro_batch_size * self.data_parallel_size)
        return Batch(global_batch_size, micro_batch_size, num_microbatches)

    def micro_batch_size_for(self, global_batch_size: int) -> int:
        """Return the samples per micro-batch and replica at ``global_batch_size``."""
        index = bisect_right(self.micro_batch_size_steps, global_batch_size, key=lambda step: step[0])
        if index == 0:
            return self.micro_batch_size
        return self.micro_batch_size_steps[index - 1][1]

    def phases(
        self,
        *,
        total_samples: int | None = None,
        total_steps: int | None = None,
        first_step: int = 0,
        first_sample: int = 0,
    ) -> list[RampPhase]:
        """Expand the ramp until ``total_samples`` are consumed or ``total_steps`` are done (exactly one is given).

        A phase is computed at once, not step by step: BLOOM's ramp has 12,658 steps in 116 phases.

        Steps are never cut: the last one may consume past ``total_samples``.

        Args:
            first_step: steps that are done already, under whatever ramp; both totals are of the whole run.
            first_sample: samples that they have consumed.

        Returns:
            The phases of the steps that are left; none where the run is over.

        Raises:
            BatchDivisionError: a global batch of the run does not divide by micro-batch size x data-parallel size; the
                first ``SHOWN_FAULTS`` such sizes are named with their legal neighbours.
        """
        phases: list[RampPhase] = []
        step = first_step
        consumed = first_sample
        while goes_on(step, consumed, total_steps, total_samples):
            batch = self.at(consumed)
            # The phase ends with the first of: the ramp's next boundary, the run's samples, the run's steps. The step
            # that crosses a boundary still has the size with which it started.
            ends = [self.schedule.next_boundary(consumed), total_samples]
            steps_left = [-(-(end - consumed) // batch.global_batch_size) for end in ends if end is not None]
            if total_steps is not None:
                steps_left.append(total_steps - step)
            num_steps = min(steps_left)
            phases.append(RampPhase(step, consumed, num_steps, batch))
            step += num_steps
            consumed += num_steps * batch.global_batch_size
        indivisible = [
            phase for phase in phases if phase.batch.global_batch_size % self._unit(phase.batch.global_batch_size)
        ]
        if indivisible:
            faults = [self._division_fault(phase) for phase in indivisible[:SHOWN_FAULTS]]
            if len(indivisible) > SHOWN_FAULTS:
                faults.append(f"and {len(indivisible) - SHOWN_FAULTS:,} more sizes")
            raise BatchDivisionError(faults)
        return _merge_equal_neighbours(phases)

    def _division_fault(self, phase: RampPhase) -> str:
        """Describe why the batch of a phase does not divide among replicas and micro-batches."""
        size = phase.batch.global_batch_size
        lower, upper = self._legal_neighbours(size)
        nearest = f"sizes are {lower} or {upper}" if lower else f"size is {upper}"
        return (
            f"global batch {size} (from sample {phase.first_sample:,}) is not a multiple of "
            f"micro-batch size {phase.batch.micro_batch_size} x data-parallel size {self.data_parallel_size} = "
            f"{self._unit(size)}; the nearest legal {nearest}"
        )

    def _legal_neighbours(self, size: int) -> tuple[int | None, int]:
        """Return the nearest sizes below and above that divide among replicas and micro-batches; None for no lower."""
        lower: int | None = None
        # The unit may change between the size and its neighbour, so every range of one unit is asked for its own.
        starts = [1, *(start for start, _ in self.micro_batch_size_steps)]
        for start, following in pairwise([*starts, None]):
            assert start is not None
            unit = self._unit(start)
            last = size if following is None else min(size, following - 1)
            below = last // unit * unit
            if below >= start:
                lower = below
            above = -(-max(size, start) // unit) * unit
            if following is None or above < following:
                return lower, above
        raise AssertionError("the last range has no end")

    def _divides(self, global_batch_size: int) -> bool:
        return global_batch_size % self._unit(global_batch_size) == 0

    def _unit(self, global_batch_size: int) -> int:
        """Return what the global batch has to be a multiple of: one micro-batch on every replica."""
        return self.micro_batch_size_for(global_batch_size) * self.data_parallel_size


def goes_on(step: int, consumed_samples: int, total_steps: int | None, total_samples: int | None) -> bool:
    """Tell whether another step follows ``step`` steps, by the one of the two totals that is given."""
    if total_samples is not None:
        return consumed_samples < total_samples
    return step < (total_steps or 0)


def _merge_equal_neighbours(phases: Sequence[RampPhase]) -> list[RampPhase]:
    """Join phases of the same batch: a step list may name a size twice in a row."""
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
        """Count the steps and samples of the run that ``phases`` (not empty) expand to."""
        last = phases[-1]
        total_samples = last.first_sample + last.num_steps * last.batch.global_batch_size
        return cls(last.first_step + last.num_steps, total_samples, total_samples - last.batch.global_batch_size)
