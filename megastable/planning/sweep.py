"""The report of a sweep over batches of a planned run: measured beside predicted, and where its ramp could start.

``throughput`` has the rows of which it is made, and the words that they use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megastable.core.batch_rampup import Batch
from megastable.core.pipeline_cost import PipelineCost
from megastable.planning.calibration import Sweep
from megastable.planning.data_sheet_cost import relative_cost
from megastable.planning.measured_cost import MeasuredStep, calibrate_unequal
from megastable.planning.run_plan import RunPlan
from megastable.planning.throughput import (
    StepSeconds,
    SweepRow,
    Work,
    calibration_half,
    measured_row,
    median_unseen_error,
    planned_row,
    recommended_start,
    tokens_per_second,
)


@dataclass(frozen=True)
class SweepReport:
    """A row for every batch, and what follows from them.

    Attributes:
        share: of the top speed, that the recommended start reaches.
        recommended: None where no speed is known.
        cost: of a step; fitted to all measured batches, or the one that was predicted from.
    """

    rows: list[SweepRow]
    share: float
    recommended: Batch | None
    cost: PipelineCost | None

    @property
    def median_unseen_error(self) -> float | None:
        """Compute the median error of the steps that the prediction has not seen; None where there are none."""
        return median_unseen_error(self.rows)


def planned_sweep(plan: RunPlan, batches: Sequence[Batch], share: float, cost: PipelineCost | None) -> SweepReport:
    """Report batches of which nothing was measured; their steps are predicted where a cost is known."""
    # Without a cost there are no speeds either, and nothing can be recommended.
    work = work_of(plan)
    rows = [planned_row(batch, work, cost) for batch in batches]
    speeds = {
        batch: tokens_per_second(batch, work, row.predicted_step_seconds)
        for batch, row in zip(batches, rows, strict=True)
        if row.predicted_step_seconds
    }
    return SweepReport(rows, share, recommended_start(speeds, share), cost)


def measured_sweep(plan: RunPlan, seconds: Mapping[Batch, Sequence[float]], share: float) -> SweepReport:
    """Report measured batches, from the seconds of every batch's steps, warm-up left out."""
    work = work_of(plan)
    steps = {batch: StepSeconds.of(values) for batch, values in seconds.items()}
    # All points give the best costs. Only points that a fit has not seen can tell how well it predicts.
    half = calibration_half(list(steps))
    fitted_to_all = fitted_cost(plan, steps)
    fitted_to_half = fitted_cost(plan, {batch: steps[batch] for batch in half})
    rows = [
        measured_row(batch, work, took, fitted_to_all, fitted_to_half, batch in half) for batch, took in steps.items()
    ]
    speeds = {batch: tokens_per_second(batch, work, took.median) for batch, took in steps.items()}
    return SweepReport(rows, share, recommended_start(speeds, share), fitted_to_all)


def fitted_cost(plan: RunPlan, steps: Mapping[Batch, StepSeconds]) -> PipelineCost:
    """Fit the costs to the medians; the stages share them by their operations."""
    # A median leaves out the one step that another process of the machine has slowed.
    measured = [
        MeasuredStep(batch.micro_batch_size, batch.num_microbatches, took.median) for batch, took in steps.items()
    ]
    return calibrate_unequal(measured, relative_cost(plan))


def as_section(report: SweepReport) -> Sweep:
    """Return what a calibration file keeps of a measured sweep.

    Raises:
        ValueError: nothing was measured.
    """
    if report.recommended is None:
        raise ValueError("only a measured sweep is kept")
    return Sweep(
        rows=tuple(report.rows),
        share=report.share,
        recommended_global_batch_size=report.recommended.global_batch_size,
        median_unseen_error=report.median_unseen_error,
    )


def work_of(plan: RunPlan) -> Work:
    """Gather what a sample of the plan takes, and how many devices share it."""
    return Work(
        seq_length=plan.run.megastable.model.seq_length,
        model_flops_per_sample=plan.model_flops_per_sample,
        hardware_flops_per_sample=plan.hardware_flops_per_sample,
        num_stages=plan.layout.num_stages,
        data_parallel_size=plan.layout.data_parallel_size,
        num_devices=plan.layout.world_size,
    )
