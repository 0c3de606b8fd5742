"""What times are predicted from: a device's data sheet, a calibration file, or this machine, measured now.

The forecast of one run on its layout: every phase of the ramp, its time, and the memory of every stage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megastable.core.batch_rampup import RampPhase
from megastable.core.errors import UserError
from megastable.core.flops import tflops_per_device
from megastable.core.memory import MemoryUse
from megastable.core.pipeline_cost import PipelineCost, bubble
from megastable.planning.calibration import Calibration, CalibrationFile, calibration_of, check_new, load_calibration
from megastable.planning.machine import CPU, DEFAULT_EFFICIENCY, OUTSIDE_THE_STEPS, Machine
from megastable.planning.memory import stage_memory
from megastable.planning.run_plan import RunPlan
from megastable.planning.step_time import relative_cost, step_cost


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
        *,
        probe: Callable[[RunPlan], CalibrationFile],
    ) -> Basis:
        """From the command line. Measures where the device is this CPU, and no figures describe it.

        Args:
            probe: measures the machine for a plan.

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

        file = probe(plan)
        if save_calibration is not None:
            file.write(save_calibration)
        return cls(calibration=calibration_of(file, plan, "this machine"))

    def cost(self, plan: RunPlan) -> PipelineCost | None:
        """Of the plan's steps; None where nothing is known."""
        if self.calibration is not None:
            return self.calibration.cost
        return step_cost(plan, self.machine) if self.machine else None


@dataclass(frozen=True)
class PhaseSpeed:
    """How fast the steps of one phase are expected to be."""

    step_seconds: float
    tflops_per_device: float
    """Of model operations."""
    hardware_tflops_per_device: float
    """With recomputation and the padded vocabulary."""
    tokens_per_second: float


@dataclass(frozen=True)
class PhaseForecast:
    """One phase of the ramp."""

    phase: RampPhase
    bubble: float
    """(p - 1) / (m + p - 1), of equal stages."""
    idle_share: float
    """Of the stages as they are: the bubble, and what unequal stages add."""
    speed: PhaseSpeed | None
    """None where the device is not known."""


@dataclass(frozen=True)
class Forecast:
    """What a run will take."""

    plan: RunPlan
    machine: Machine | None
    phases: list[PhaseForecast]
    memory: list[MemoryUse]
    """Of one device of every stage, from the first to the last."""
    calibration: Calibration | None = None
    """What was measured, and is predicted from instead of a machine."""

    @property
    def seconds_to_train(self) -> float | None:
        """All steps; None where nothing is known of the device."""
        if self.machine is None and self.calibration is None:
            return None
        return sum(entry.phase.num_steps * entry.speed.step_seconds for entry in self.phases if entry.speed)

    @property
    def fullest_stage(self) -> int:
        """The stage whose devices need most memory."""
        return max(range(len(self.memory)), key=lambda stage: self.memory[stage].total)

    @property
    def usable_bytes(self) -> float | None:
        """Memory of a device that is left for training; None where it is not known."""
        known = self.machine.device if self.machine else self.calibration
        return known.usable_bytes if known else None

    @property
    def fits(self) -> bool | None:
        """Whether every stage fits its devices; None where their memory is not known."""
        usable = self.usable_bytes
        return None if usable is None else self.memory[self.fullest_stage].total <= usable

    @property
    def assumptions(self) -> list[str]:
        """What the numbers rest on."""
        always = ["memory is counted from the code (beside measured steps in docs/planning.md); fragments come on top"]
        if self.calibration is not None:
            return [f"times are those of {self.calibration.source}", OUTSIDE_THE_STEPS, *always]
        if self.machine is None:
            return ["no device is named, so times and speeds are unknown; name one with --device", *always]
        return [*self.machine.assumptions(self.plan.run.number_format), *always]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON; null is what is not known."""
        layout, length, machine = self.plan.layout, self.plan.length, self.machine
        return {
            "layout": {**asdict(layout), "world_size": layout.world_size},
            "total_steps": length.total_steps,
            "total_samples": length.total_samples,
            "total_tokens": length.total_samples * self.plan.run.megastable.model.seq_length,
            "ramp": [
                {"first_step": entry.first_step, "first_sample": entry.first_sample, **asdict(entry.batch)}
                for entry in self.plan.phases
            ],
            "phases": [_phase_as_dict(entry) for entry in self.phases],
            "seconds_to_train": self.seconds_to_train,
            "device": asdict(machine.device) if machine else None,
            "efficiency": machine.efficiency if machine else None,
            "stages": self.plan.cut.descriptions,
            "imbalance": self.plan.cut.imbalance,
            "calibration": self.calibration.source if self.calibration else None,
            "memory": [{"stage": stage, **use.by_kind()} for stage, use in enumerate(self.memory)],
            "fits": self.fits,
            "assumptions": self.assumptions,
        }


def forecast(plan: RunPlan, machine: Machine | None, calibration: Calibration | None = None) -> Forecast:
    """Forecast a planned run from a machine or a calibration; with neither only what does not depend on one."""
    cost = calibration.cost if calibration else step_cost(plan, machine) if machine else None
    shares = cost or relative_cost(plan)
    phases = [_forecast_phase(plan, phase, shares, cost) for phase in plan.phases]
    on_cpu = calibration.on_cpu if calibration else machine is not None and machine.on_cpu
    return Forecast(plan, machine, phases, stage_memory(plan, on_cpu), calibration)


def _forecast_phase(plan: RunPlan, phase: RampPhase, shares: PipelineCost, cost: PipelineCost | None) -> PhaseForecast:
    batch = phase.batch
    return PhaseForecast(
        phase=phase,
        bubble=bubble(plan.layout.num_stages, batch.num_microbatches),
        idle_share=shares.idle_share(batch.micro_batch_size, batch.num_microbatches),
        speed=phase_speed(plan, phase, cost) if cost else None,
    )


def phase_speed(plan: RunPlan, phase: RampPhase, cost: PipelineCost) -> PhaseSpeed:
    """The speed of the steps of a phase at a cost."""
    batch, devices = phase.batch, plan.layout.world_size
    seconds = cost.step_seconds(batch.micro_batch_size, batch.num_microbatches)

    def tflops(flops_per_sample: int) -> float:
        return tflops_per_device(flops_per_sample, batch.global_batch_size, seconds, devices)

    return PhaseSpeed(
        step_seconds=seconds,
        tflops_per_device=tflops(plan.model_flops_per_sample),
        hardware_tflops_per_device=tflops(plan.hardware_flops_per_sample),
        tokens_per_second=batch.global_batch_size * plan.run.megastable.model.seq_length / seconds,
    )


def _phase_as_dict(entry: PhaseForecast) -> dict[str, Any]:
    speed = dict.fromkeys(PhaseSpeed.__dataclass_fields__) if entry.speed is None else asdict(entry.speed)
    return {
        "first_step": entry.phase.first_step,
        "num_steps": entry.phase.num_steps,
        "bubble": entry.bubble,
        "idle_share": entry.idle_share,
        **speed,
        "seconds": None if entry.speed is None else entry.phase.num_steps * entry.speed.step_seconds,
    }
