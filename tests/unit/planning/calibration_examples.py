"""Calibration files and sweeps of the tiny run."""

from __future__ import annotations

from typing import Any

from megastable.core.batch_rampup import Batch
from megastable.core.pipeline_cost import MicroBatchTime, PipelineCost, StageTime
from megastable.planning.calibration import CalibrationFile, calibration_file
from megastable.planning.run_plan import RunPlan
from megastable.planning.throughput import sweep_batches

SIZES = (4, 8, 12, 16, 20)


def cost_of_stages(num_stages: int, scale: float = 1.0) -> PipelineCost:
    """Build stages of different lengths, with every kind of cost."""
    stages = tuple(
        StageTime(MicroBatchTime(0.01 * scale, 0.1 + 0.01 * stage), MicroBatchTime(0.02, 0.2 * scale))
        for stage in range(num_stages)
    )
    return PipelineCost(stages, MicroBatchTime(0.001, 0.002), fixed_seconds=0.5)


def file_of(plan: RunPlan, **changes: Any) -> CalibrationFile:
    """Build a calibration file that fits the plan."""
    values = {"method": "sweep", "device": "a machine", "on_cpu": True, "memory_gib": 2.0, **changes}
    return calibration_file(plan, cost_of_stages(plan.layout.num_stages), **values)


def made_seconds(plan: RunPlan, cost: PipelineCost, sizes: tuple[int, ...] = SIZES) -> dict[Batch, list[float]]:
    """Make the steps of a sweep as a cost predicts them, with a slow one among them."""
    swept = sweep_batches(sizes, [1, 2], plan.layout.data_parallel_size)
    times = {batch: cost.step_seconds(batch.micro_batch_size, batch.num_microbatches) for batch in swept}
    return {batch: [took, took, 3 * took] for batch, took in times.items()}
