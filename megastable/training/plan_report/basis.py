"""What times are predicted from: a device's data sheet, a calibration file, or this machine, measured now."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megastable.core.errors import UserError
from megastable.core.pipeline_cost import PipelineCost
from megastable.training.plan_report.assumptions import CPU, DEFAULT_EFFICIENCY, Machine
from megastable.training.plan_report.calibrated import Calibration, calibration_of, load_calibration
from megastable.training.plan_report.calibration_file import check_new
from megastable.training.plan_report.timing import step_cost
from megastable.training.run_plan import RunPlan


@dataclass(frozen=True)
class Basis:
    """One of the two, or neither: then no times are known."""

    machine: Machine | None = None
    calibration: Calibration | None = None

    @classmethod
    def of(
        cls,
        plan: RunPlan,
        device: str | None,
        peak_tflops: float | None = None,
        memory_gib: float | None = None,
        efficiency: float = DEFAULT_EFFICIENCY,
        calibration: Path | None = None,
        save_calibration: Path | None = None,
    ) -> Basis:
        """From the command line. Measures where the device is this CPU, and no figures describe it; loads torch then.

        Raises:
            UserError: the options exclude each other, the device is unknown, or a file is refused.
        """
        described = not (device is None and peak_tflops is None and memory_gib is None)
        probes = device is not None and device.lower() == CPU and peak_tflops is None and memory_gib is None
        if save_calibration is not None:
            if not probes or calibration is not None:
                raise UserError("--save-calibration writes what --device cpu measures without further figures")
            check_new(save_calibration)
        if calibration is not None:
            if described:
                raise UserError("--calibration stands in place of a device; give one of them")
            return cls(calibration=load_calibration(calibration, plan))
        if not probes:
            return cls(machine=Machine.of(device, peak_tflops, memory_gib, efficiency))

        from megastable.training.cpu_probe import probe  # loads torch

        file = probe(plan)
        if save_calibration is not None:
            file.write(save_calibration)
        return cls(calibration=calibration_of(file, plan, "this machine"))

    def cost(self, plan: RunPlan) -> PipelineCost | None:
        """Of the plan's steps; None where nothing is known."""
        if self.calibration is not None:
            return self.calibration.cost
        return step_cost(plan, self.machine) if self.machine else None
