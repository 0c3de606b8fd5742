"""Calibration files with costs made up for a test."""

from __future__ import annotations

from pathlib import Path

from megastable.config import RunConfig
from megastable.core.pipeline_cost import MicroBatchTime, PipelineCost, StageTime
from megastable.planning.calibration import calibration_file
from megastable.planning.run_plan import RunPlan

SAMPLE_SECONDS = 0.1


def write_calibration(
    path: Path,
    run: RunConfig,
    world_size: int,
    micro_batch_seconds: float,
    *,
    memory_gib: float | None = None,
    on_cpu: bool = True,
) -> Path:
    """Equal stages, where a micro-batch takes so many seconds whatever its size, and 0.1 a sample; returns ``path``."""
    half = MicroBatchTime(micro_batch_seconds / 2, SAMPLE_SECONDS / 2)
    plan = RunPlan.of(run, world_size)
    cost = PipelineCost((StageTime(half, half),) * plan.layout.num_stages)
    file = calibration_file(plan, cost, method="probe", device="made up", on_cpu=on_cpu, memory_gib=memory_gib)
    file.write(path)
    return path
