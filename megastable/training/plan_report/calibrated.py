"""The cost of a run's steps from measurements instead of a data sheet."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megastable.core.errors import UserError
from megastable.core.pipeline_cost import PipelineCost
from megastable.training.plan_report.calibration_file import (
    CalibrationFile,
    differing_keys,
    read_calibration_file,
    timed_keys,
)
from megastable.training.run_plan import RunPlan

GIB = 2**30


@dataclass(frozen=True)
class Calibration:
    """What was measured of a run's steps, ready to predict from.

    Attributes:
        usable_bytes: memory of one process; None where it is not known.
        source: for people: what was measured, where, and what the figures leave out.
        on_cpu: the processes compute on a CPU.
    """

    cost: PipelineCost
    usable_bytes: float | None
    source: str
    on_cpu: bool = False


def load_calibration(path: Path, plan: RunPlan) -> Calibration:
    """A calibration file that fits the plan.

    Raises:
        UserError: the file cannot be read, or is of another model, layout of stages or number format.
    """
    file = read_calibration_file(path)
    different = differing_keys(file, plan.run)
    if different:
        lines = "\n  ".join(map(str, different))
        raise UserError(f"{path}: was measured on another run, so its times do not hold for this one:\n  {lines}")
    if len(file.cost.stages) != plan.layout.num_stages:
        raise UserError(f"{path}: has costs of {len(file.cost.stages)} stages, the run has {plan.layout.num_stages}")
    return calibration_of(file, plan, str(path))


def calibration_of(file: CalibrationFile, plan: RunPlan, name: str) -> Calibration:
    """What a file that fits the plan says of it."""
    source = f"{name}, a {file.method} on {file.device}"
    measured, planned = file.data_parallel_size, plan.layout.data_parallel_size
    if measured != planned:
        source += (
            f", with {measured} replica(s) instead of {planned}: what more or fewer of them change in summing "
            "gradients and sharing the update is not in the times"
        )
    usable = None if file.memory_gib_per_process is None else file.memory_gib_per_process * GIB
    return Calibration(file.cost, usable, source, file.on_cpu)


def calibration_file(
    plan: RunPlan, cost: PipelineCost, *, method: str, device: str, on_cpu: bool, memory_gib: float | None
) -> CalibrationFile:
    """What was measured of a plan's steps, ready to be written.

    Args:
        method: "sweep" or "probe".
        memory_gib: usable, of one process.
    """
    return CalibrationFile.model_validate(
        {
            "method": method,
            "device": device,
            "on_cpu": on_cpu,
            "data_parallel_size": plan.layout.data_parallel_size,
            "memory_gib_per_process": memory_gib,
            "run": timed_keys(plan.run),
            "cost": cost,
        }
    )
