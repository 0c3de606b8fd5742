"""The batches of a sweep, and what the measured steps of each one say: its row.

Three words, for m micro-batches on p stages:

* *limit*: m / (m + p - 1), the share of a stage's time in which it computes where all stages are equal (1 - bubble);
* *peak*: samples a second without bubble and without fixed cost. Nobody can measure it, so it is that of the costs
  fitted to all points of the sweep: replicas x micro-batch size / seconds of the slowest stage's two passes;
* *share of the limit*: measured samples a second / (peak x limit). What is missing to 1 is the fixed cost of a step and
  what the fit leaves over. It is near 1 at large batches whatever the hardware, since the peak is fitted there: it
  judges the small batches, not the machine. Unequal stages can bring it over 1: the shorter ones fill faster.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from megastable.core.batch_rampup import Batch
from megastable.core.errors import UserError
from megastable.core.flops import tflops_per_device
from megastable.core.pipeline_cost import PipelineCost, bubble

LEAST_MEASURED_STEPS = 3
DEFAULT_SHARE = 0.5


@dataclass(frozen=True)
class Work:
    """What a sample takes, and how many devices share it."""

    seq_length: int
    model_flops_per_sample: int
    hardware_flops_per_sample: int
    num_stages: int
    data_parallel_size: int
    num_devices: int


@dataclass(frozen=True)
class StepSeconds:
    """The measured steps of one batch."""

    median: float
    least: float
    most: float
    num_steps: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> StepSeconds:
        """Summarize at least one step."""
        return cls(statistics.median(seconds), min(seconds), max(seconds), len(seconds))


@dataclass(frozen=True)
class SweepRow:
    """One batch of a sweep. None is what was not measured, or not predicted."""

    global_batch_size: int
    micro_batch_size: int
    num_microbatches: int
    bubble: float
    limit: float
    step_seconds: StepSeconds | None = None
    tokens_per_second: float | None = None
    tflops_per_device: float | None = None
    hardware_tflops_per_device: float | None = None
    share_of_limit: float | None = None
    predicted_step_seconds: float | None = None
    calibrated_on: bool = False
    """The prediction has seen this point."""

    @property
    def error(self) -> float | None:
        """Compute predicted over measured seconds, minus 1; None where one of them is missing."""
        if self.step_seconds is None or self.predicted_step_seconds is None:
            return None
        return self.predicted_step_seconds / self.step_seconds.median - 1


# Which batches are swept, and how often each is measured


def parse_sizes(text: str, option: str) -> list[int]:
    """Parse the sizes that a person separated by commas, and return them in rising order.

    Raises:
        UserError: an entry is no whole number from 1, or stands there twice.
    """
    words = [word.strip() for word in text.split(",")]
    # isdigit alone also takes the digits of other scripts, and int refuses some of those, such as superscripts.
    if not all(word.isascii() and word.isdigit() and int(word) > 0 for word in words):
        raise UserError(f"{option} {text}: must be whole numbers from 1, separated by commas, e.g. 2,4,8")
    sizes = sorted(map(int, words))
    twice = sorted({size for size in sizes if sizes.count(size) > 1})
    if twice:
        raise UserError(f"{option} {text}: {', '.join(map(str, twice))} given twice")
    return sizes


def sweep_batches(
    global_batch_sizes: Sequence[int], micro_batch_sizes: Sequence[int], data_parallel_size: int
) -> list[Batch]:
    """List every global batch in every micro-batch size, ordered by micro-batch size and global batch.

    Raises:
        UserError: one does not divide (all such pairs are named), or there are fewer than two to compare.
    """
    pairs = [(micro, size) for micro in micro_batch_sizes for size in global_batch_sizes]
    faults = [
        f"global batch {size} is not a multiple of micro-batch size {micro} x data-parallel size {data_parallel_size} "
        f"= {micro * data_parallel_size}"
        for micro, size in pairs
        if size % (micro * data_parallel_size)
    ]
    if faults:
        raise UserError("\n  ".join(["--global-batch-sizes does not fit the layout:", *faults]))
    if len(pairs) < 2:
        raise UserError("--global-batch-sizes: a sweep needs at least two batches")
    return [Batch(size, micro, size // (micro * data_parallel_size)) for micro, size in pairs]


def steps_of_each(batches: Sequence[Batch], rounds: int) -> dict[Batch, int]:
    """Decide in how many of the rounds each batch is measured, so that the large ones do not take all the time.

    A batch of k times the median's samples has a kth of the rounds, and no fewer than three (or all, where there are
    fewer rounds). A pure function of the sizes, so that all ranks agree.
    """
    median = statistics.median(batch.global_batch_size for batch in batches)
    # Three is the least of which a median leaves out one slow step.
    least = min(LEAST_MEASURED_STEPS, rounds)
    return {batch: min(rounds, max(least, round(rounds * median / batch.global_batch_size))) for batch in batches}


def takes_part(round_number: int, num_steps: int, rounds: int) -> bool:
    """Tell whether a batch is measured in this round (from 1), so that its ``num_steps`` are evenly spread."""
    # After each round a batch is due the whole part of its share so far; it is measured where that has grown.
    due_before = (round_number - 1) * num_steps // rounds
    due_now = round_number * num_steps // rounds
    return due_now > due_before


def calibration_half(batches: Sequence[Batch]) -> list[Batch]:
    """Choose the points to fit a prediction of the others to.

    They are, of every micro-batch size, every other global batch from the smallest on. Where that leaves fewer than two
    they are all points, and no point is left to check on.
    """
    # From the smallest on, so that the fit has the end where the fixed cost weighs most; every size, for its slope.
    ordered = sorted(batches, key=lambda batch: (batch.micro_batch_size, batch.global_batch_size))
    groups = (list(group) for _, group in groupby(ordered, key=lambda batch: batch.micro_batch_size))
    half = [batch for group in groups for batch in group[::2]]
    return half if len(half) > 1 else ordered


# What is said of each


def planned_row(batch: Batch, work: Work, cost: PipelineCost | None = None) -> SweepRow:
    """Build a row without measured values, predicted where a cost is known."""
    idle = bubble(work.num_stages, batch.num_microbatches)
    predicted = None
    if cost is not None:
        predicted = cost.step_seconds(batch.micro_batch_size, batch.num_microbatches)
    return SweepRow(
        batch.global_batch_size,
        batch.micro_batch_size,
        batch.num_microbatches,
        bubble=idle,
        limit=1 - idle,
        predicted_step_seconds=predicted,
    )


def measured_row(
    batch: Batch, work: Work, seconds: StepSeconds, fitted_to_all: PipelineCost, fitted_to_half: PipelineCost,
    calibrated_on: bool,
) -> SweepRow:  # fmt: skip
    """Build the row of a measured batch.

    Args:
        fitted_to_all: the costs that give the peak.
        fitted_to_half: those that predict.
        calibrated_on: the latter have seen this batch.
    """
    row = planned_row(batch, work, fitted_to_half)
    # Without bubble, all replicas finish a micro-batch each time the slowest stage has done both its passes.
    samples_per_slot = work.data_parallel_size * batch.micro_batch_size
    peak = samples_per_slot / fitted_to_all.passes(batch.micro_batch_size).slowest_stage

    def tflops(flops_per_sample: int) -> float:
        return tflops_per_device(flops_per_sample, batch.global_batch_size, seconds.median, work.num_devices)

    return replace(
        row,
        step_seconds=seconds,
        tokens_per_second=tokens_per_second(batch, work, seconds.median),
        tflops_per_device=tflops(work.model_flops_per_sample),
        hardware_tflops_per_device=tflops(work.hardware_flops_per_sample),
        share_of_limit=batch.global_batch_size / seconds.median / (peak * row.limit),
        calibrated_on=calibrated_on,
    )


def tokens_per_second(batch: Batch, work: Work, step_seconds: float) -> float:
    """Compute the tokens that all devices together take a second."""
    return batch.global_batch_size * work.seq_length / step_seconds


# What follows from all of them


def recommended_start(speeds: Mapping[Batch, float], share: float) -> Batch | None:
    """Choose the smallest global batch whose speed is ``share`` of the top, in its fastest split.

    Args:
        speeds: of every batch, in any unit that is the larger the better.
        share: 0 to 1; with 1 it is the fastest itself.

    Returns:
        None where there are no speeds.
    """
    if not speeds:
        return None
    # Of equal global batches the fastest split comes first.
    enough = share * max(speeds.values())
    return min(
        (batch for batch, speed in speeds.items() if speed >= enough),
        key=lambda batch: (batch.global_batch_size, -speeds[batch]),
    )


def median_unseen_error(rows: Sequence[SweepRow]) -> float | None:
    """Compute the median relative error, without its sign, of the points that the prediction has not seen, if any."""
    errors = [abs(row.error) for row in rows if row.error is not None and not row.calibrated_on]
    return statistics.median(errors) if errors else None


def errors_of(cost: PipelineCost, rows: Sequence[SweepRow]) -> list[float]:
    """Compute predicted over measured seconds, minus 1, of every measured row, predicted from costs found elsewhere."""
    return [
        cost.step_seconds(row.micro_batch_size, row.num_microbatches) / row.step_seconds.median - 1
        for row in rows
        if row.step_seconds is not None
    ]
