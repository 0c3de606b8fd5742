"""A sweep over batches: which ones, what their measured steps say, and from which size on a ramp is worth starting.

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
from dataclasses import dataclass
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
        """Of at least one step."""
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
        """Predicted over measured seconds, minus 1."""
        if self.step_seconds is None or self.predicted_step_seconds is None:
            return None
        return self.predicted_step_seconds / self.step_seconds.median - 1


def parse_sizes(text: str, option: str) -> list[int]:
    """Sizes that a person separated by commas, in rising order.

    Raises:
        UserError: an entry is no whole number from 1, or stands there twice.
    """
    words = [word.strip() for word in text.split(",")]
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
    """Every global batch in every micro-batch size, ordered by micro-batch size and global batch.

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
    """In how many of the rounds each batch is measured, so that the large ones do not take all the time.

    A batch of k times the median's samples has a kth of the rounds, and no fewer than three (or all, where there are
    fewer rounds). A pure function of the sizes, so that all ranks agree.
    """
    median = statistics.median(batch.global_batch_size for batch in batches)
    least = min(LEAST_MEASURED_STEPS, rounds)
    return {batch: min(rounds, max(least, round(rounds * median / batch.global_batch_size))) for batch in batches}


def takes_part(round_number: int, num_steps: int, rounds: int) -> bool:
    """Whether this round (from 1) is one of the ``num_steps`` in which a batch is measured; they are evenly spread."""
    return round_number * num_steps // rounds > (round_number - 1) * num_steps // rounds


def calibration_half(batches: Sequence[Batch]) -> list[Batch]:
    """The points that a prediction of the others is fitted to.

    Of every micro-batch size every other global batch, from the smallest on. All of them where that leaves fewer than
    two, and nothing to check on.
    """
    ordered = sorted(batches, key=lambda batch: (batch.micro_batch_size, batch.global_batch_size))
    groups = (list(group) for _, group in groupby(ordered, key=lambda batch: batch.micro_batch_size))
    half = [batch for group in groups for batch in group[::2]]
    return half if len(half) > 1 else ordered


def planned_row(batch: Batch, work: Work, cost: PipelineCost | None = None) -> SweepRow:
    """A row without measured values, predicted where a cost is known."""
    idle = bubble(work.num_stages, batch.num_microbatches)
    return SweepRow(
        batch.global_batch_size,
        batch.micro_batch_size,
        batch.num_microbatches,
        bubble=idle,
        limit=1 - idle,
        predicted_step_seconds=cost.step_seconds(batch.micro_batch_size, batch.num_microbatches) if cost else None,
    )


def measured_row(
    batch: Batch, work: Work, seconds: StepSeconds, fitted_to_all: PipelineCost, fitted_to_half: PipelineCost,
    calibrated_on: bool,
) -> SweepRow:  # fmt: skip
    """A row of a measured batch.

    Args:
        fitted_to_all: the costs that give the peak.
        fitted_to_half: those that predict.
        calibrated_on: the latter have seen this batch.
    """
    row, size = planned_row(batch, work, fitted_to_half), batch.global_batch_size
    peak = (
        work.data_parallel_size
        * batch.micro_batch_size
        / fitted_to_all.passes(batch.micro_batch_size).slowest_stage
    )  # fmt: skip

    def tflops(flops_per_sample: int) -> float:
        return tflops_per_device(flops_per_sample, size, seconds.median, work.num_devices)

    return SweepRow(
        row.global_batch_size,
        row.micro_batch_size,
        row.num_microbatches,
        bubble=row.bubble,
        limit=row.limit,
        step_seconds=seconds,
        tokens_per_second=tokens_per_second(batch, work, seconds.median),
        tflops_per_device=tflops(work.model_flops_per_sample),
        hardware_tflops_per_device=tflops(work.hardware_flops_per_sample),
        share_of_limit=size / seconds.median / (peak * row.limit),
        predicted_step_seconds=row.predicted_step_seconds,
        calibrated_on=calibrated_on,
    )


def tokens_per_second(batch: Batch, work: Work, step_seconds: float) -> float:
    """Of all devices together."""
    return batch.global_batch_size * work.seq_length / step_seconds


def recommended_start(speeds: Mapping[Batch, float], share: float) -> Batch | None:
    """The smallest global batch whose speed is ``share`` of the top, in its fastest split; None of nothing.

    Args:
        speeds: of every batch, in any unit that is the larger the better.
        share: 0 to 1; with 1 it is the fastest itself.
    """
    if not speeds:
        return None
    enough = share * max(speeds.values())
    return min(
        (batch for batch, speed in speeds.items() if speed >= enough),
        key=lambda batch: (batch.global_batch_size, -speeds[batch]),
    )


def median_unseen_error(rows: Sequence[SweepRow]) -> float | None:
    """Median size of the relative error of predicted steps, of the points that the prediction has not seen."""
    errors = [abs(row.error) for row in rows if row.error is not None and not row.calibrated_on]
    return statistics.median(errors) if errors else None


def errors_of(cost: PipelineCost, rows: Sequence[SweepRow]) -> list[float]:
    """Predicted over measured seconds, minus 1, of every measured row, predicted from costs found elsewhere."""
    return [
        cost.step_seconds(row.micro_batch_size, row.num_microbatches) / row.step_seconds.median - 1
        for row in rows
        if row.step_seconds is not None
    ]
