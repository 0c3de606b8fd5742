"""The forecast of one run on its layout: every phase of the ramp, its time, and the memory of every stage.

Times rest on a device's data sheet, a calibration file, or a measurement of this machine made now (``Basis``).
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
from megastable.planning.data_sheet_cost import CPU, OUTSIDE_THE_STEPS, Machine, relative_cost, step_cost
from megastable.planning.memory import stage_memory
from megastable.planning.run_plan import RunPlan


@dataclass(frozen=True)
class Basis:
    """What times are predicted from: a machine or a calibration. With neither, no times are known."""

    machine: Machine | None = None
    calibration: Calibration | None = None

    @classmethod
    def of(
        cls,
        plan: RunPlan,
        device: str | None,
        peak_tflops: float | None = None,
        memory_gib: float | None = None,
        efficiency: float | None = None,
        calibration: Path | None = None,
        save_calibration: Path | None = None,
        *,
        probe: Callable[[RunPlan], CalibrationFile],
    ) -> Basis:
        """Find the basis that a command line asks for.

        This machine is measured where the device is this CPU, and no figures describe it.

        Args:
            efficiency: share of a device's peak; None for the default.
            probe: measures the machine for a plan.

        Raises:
            UserError: the options exclude each other, the device is unknown, or a file is refused.
        """
        has_figures = peak_tflops is not None or memory_gib is not None
        # A CPU that is described by figures is a data sheet like any other.
        measures_now = device is not None and device.lower() == CPU and not has_figures
        # Faults of the options come before the measuring, which takes ten seconds.
        if save_calibration is not None:
            if not measures_now or calibration is not None:
                raise UserError("--save-calibration writes what --device cpu measures without further figures")
            check_new(save_calibration)
        if calibration is not None and (device is not None or has_figures):
            raise UserError("--calibration stands in place of a device; give one of them")
        if efficiency is not None and (calibration is not None or measures_now):
            raise UserError(
                "--efficiency is a share of a data sheet's peak, and measured times need none; leave it out, or "
                "name or describe a device (--device, --peak-tflops, --memory-gib) in place of the measurement"
            )

        if calibration is not None:
            return cls(calibration=load_calibration(calibration, plan))
        if not measures_now:
            return cls(machine=Machine.of(device, peak_tflops, memory_gib, efficiency))
        file = probe(plan)
        if save_calibration is not None:
            file.write(save_calibration)
        return cls(calibration=calibration_of(file, plan, "this machine"))

    def cost(self, plan: RunPlan) -> PipelineCost | None:
        """Return the cost of the plan's steps, in seconds; None where no times are known."""
        if self.calibration is not None:
            return self.calibration.cost
        if self.machine is not None:
            return step_cost(plan, self.machine)
        return None

    @property
    def on_cpu(self) -> bool:
        """Tell whether the processes compute on a CPU, whose kernels keep more than a GPU's."""
        if self.calibration is not None:
            return self.calibration.on_cpu
        return self.machine is not None and self.machine.on_cpu


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
    """What one phase of the ramp will take."""

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
        """Return the seconds of all steps; None where nothing is known of the device."""
        if self.machine is None and self.calibration is None:
            return None
        return sum(entry.phase.num_steps * entry.speed.step_seconds for entry in self.phases if entry.speed)

    @property
    def fullest_stage(self) -> int:
        """Return the stage whose devices need most memory."""
        return max(range(len(self.memory)), key=lambda stage: self.memory[stage].total)

    @property
    def usable_bytes(self) -> float | None:
        """Return the memory of a device that is left for training; None where it is not known."""
        if self.machine is not None:
            return self.machine.device.usable_bytes
        if self.calibration is not None:
            return self.calibration.usable_bytes
        return None

    @property
    def fits(self) -> bool | None:
        """Tell whether every stage fits its devices; None where their memory is not known."""
        usable = self.usable_bytes
        return None if usable is None else self.memory[self.fullest_stage].total <= usable

    @property
    def assumptions(self) -> list[str]:
        """List, for people, what the numbers rest on."""
        always = ["memory is counted from the code (beside measured steps in docs/planning.md); fragments come on top"]
        if self.calibration is not None:
            return [f"times are those of {self.calibration.source}", OUTSIDE_THE_STEPS, *always]
        if self.machine is None:
            return ["no device is named, so times and speeds are unknown; name one with --device", *always]
        return [*self.machine.assumptions(self.plan.run.number_format), *always]

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; null is what is not known."""
        layout = self.plan.layout
        length = self.plan.length
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
            "device": asdict(self.machine.device) if self.machine else None,
            "efficiency": self.machine.efficiency if self.machine else None,
            "stages": self.plan.cut.descriptions,
            "imbalance": self.plan.cut.imbalance,
            "calibration": self.calibration.source if self.calibration else None,
            "memory": [{"stage": stage, **use.by_kind()} for stage, use in enumerate(self.memory)],
            "fits": self.fits,
            "assumptions": self.assumptions,
        }


def forecast(plan: RunPlan, machine: Machine | None, calibration: Calibration | None = None) -> Forecast:
    """Forecast a planned run from a machine or a calibration; with neither only what does not depend on one."""
    basis = Basis(machine, calibration)
    cost = basis.cost(plan)
    # Waiting depends on the ratios of the stages' times alone, so operations show it where no seconds are known.
    shares = cost or relative_cost(plan)
    phases = [_forecast_phase(plan, phase, shares, cost) for phase in plan.phases]
    return Forecast(plan, machine, phases, stage_memory(plan, basis.on_cpu), calibration)


def phase_speed(plan: RunPlan, phase: RampPhase, cost: PipelineCost) -> PhaseSpeed:
    """Compute the speed of the steps of a phase at a cost in seconds."""
    batch = phase.batch
    seconds = cost.step_seconds(batch.micro_batch_size, batch.num_microbatches)

    def tflops(flops_per_sample: int) -> float:
        return tflops_per_device(flops_per_sample, batch.global_batch_size, seconds, plan.layout.world_size)

    # Papers publish either of the two rates, so that both are needed to compare with them.
    return PhaseSpeed(
        step_seconds=seconds,
        tflops_per_device=tflops(plan.model_flops_per_sample),
        hardware_tflops_per_device=tflops(plan.hardware_flops_per_sample),
        tokens_per_second=batch.global_batch_size * plan.run.megastable.model.seq_length / seconds,
    )


def _forecast_phase(plan: RunPlan, phase: RampPhase, shares: PipelineCost, cost: PipelineCost | None) -> PhaseForecast:
    batch = phase.batch
    return PhaseForecast(
        phase=phase,
        # The textbook's figure beside that of the real stages: their difference is what a better cut could win.
        bubble=bubble(plan.layout.num_stages, batch.num_microbatches),
        idle_share=shares.idle_share(batch.micro_batch_size, batch.num_microbatches),
        speed=phase_speed(plan, phase, cost) if cost else None,
    )


def _phase_as_dict(entry: PhaseForecast) -> dict[str, Any]:
    """Return a phase for JSON, with the keys of its speed also where they are not known."""
    speed: dict[str, Any] = dict.fromkeys(PhaseSpeed.__dataclass_fields__)
    seconds = None
    if entry.speed is not None:
        speed = asdict(entry.speed)
        seconds = entry.phase.num_steps * entry.speed.step_seconds
    return {
        "first_step": entry.phase.first_step,
        "num_steps": entry.phase.num_steps,
        "bubble": entry.bubble,
        "idle_share": entry.idle_share,
        **speed,
        "seconds": seconds,
    }
