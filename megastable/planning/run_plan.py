"""What a run will do, computed from its file and its number of devices before anything is built."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from megastable.config import Amount, RunConfig, load_run_file
from megastable.config.lr_schedule import DEFAULT_STABLE_SHARE, DEFAULT_STEP_FACTOR, DEFAULT_STEP_INTERVAL
from megastable.config.stages import StageCut, model_parts, model_shape
from megastable.core.batch_rampup import Batch, BatchRampup, RampPhase, RunLength
from megastable.core.flops import Recomputation
from megastable.core.layers import StageLayers, stage_parameters
from megastable.core.layout import ParallelLayout
from megastable.core.lr_schedule import BATCH_SCALING_EXPONENTS, LR_SCHEDULES, WarmupSchedule
from megastable.core.records import FRESH, TrainingState


@dataclass(frozen=True)
class RunPlan:
    """A run on its layout: every step's batch and learning rate, and the operations of a sample.

    Of a run that continues a checkpoint ``phases`` are those that are left, while ``length`` counts what is done, too.
    """

    run: RunConfig
    layout: ParallelLayout
    ramp: BatchRampup
    phases: list[RampPhase]
    length: RunLength
    lr_schedule: WarmupSchedule
    cut: StageCut
    model_flops_per_sample: int
    hardware_flops_per_sample: int

    @classmethod
    def of(cls, run: RunConfig, world_size: int, state: TrainingState = FRESH) -> RunPlan:
        """Plan ``run`` on ``world_size`` processes.

        Args:
            state: how far the run is that it continues; a step of it is left.

        Raises:
            UserError: the stages do not divide the world, or a batch of the ramp does not divide.
        """
        sections = run.megastable
        layout = run_layout(run, world_size)
        ramp = sections.batch_rampup.ramp(run.train_micro_batch_size_per_gpu, layout.data_parallel_size)
        phases = ramp.phases(
            total_samples=sections.training.total_samples,
            total_steps=sections.training.total_steps,
            first_step=state.step,
            first_sample=state.consumed_samples,
        )
        length = RunLength.of(phases)
        # Operations of the whole model, whatever its cut: a speed per device divides them by all devices.
        shape = model_shape(sections.model)
        recomputed_flops = recomputation(run).flops_per_sample(shape, shape.num_layers, holds_head=True)
        return cls(
            run=run,
            layout=layout,
            ramp=ramp,
            phases=phases,
            length=length,
            lr_schedule=learning_rate_schedule(run, length),
            cut=StageCut.of(sections.model, sections.pipeline, sections.tensor_parallel),
            model_flops_per_sample=shape.model_flops_per_sample,
            hardware_flops_per_sample=shape.hardware_flops_per_sample(recomputed_flops),
        )

    def learning_rate(self, applied_samples: int, batch: Batch) -> float:
        """Compute the learning rate of a step on ``batch`` that starts after ``applied_samples`` of applied updates.

        The file's learning rate belongs to the ramp's final batch, whether or not the run gets there: where the run
        stops changes nothing before that.
        """
        exponent = BATCH_SCALING_EXPONENTS[self.run.megastable.lr_schedule.batch_scaling]
        # Only the peak is scaled, and not below min_lr, so that the last steps reach the file's min_lr all the same.
        share = batch.global_batch_size / self.ramp.schedule.final
        return self.lr_schedule.scaled(share**exponent).at(applied_samples)

    def stage_parameters(self, stage: StageLayers) -> int:
        """Count the weights that each tensor rank of a stage holds."""
        model = self.run.megastable.model
        return stage_parameters(model_shape(model), model_parts(model), stage, self.layout.tensor_parallel_size)


def learning_rate_schedule(run: RunConfig, length: RunLength) -> WarmupSchedule:
    """Build the schedule of a run file on the samples that the run really takes.

    A warmup or decay that ends within the last step ends where that step begins, so that it uses ``min_lr``. Any other
    end stays where the file puts it: a longer or shorter run does not move the learning rate at a sample, and one that
    stops before the end of its warmup or its decay does not reach ``min_lr``.
    """
    config = run.megastable.lr_schedule
    seq_length = run.megastable.model.seq_length

    def samples(amount: Amount) -> int:
        return amount.to_samples(length.total_samples, seq_length)

    def end(position: int) -> int:
        # A step's learning rate is that of its first sample, so an end inside the last step would never be read.
        within_last_step = length.last_step_start < position <= length.total_samples
        return length.last_step_start if within_last_step else position

    # Schedules without a stable part do not read it, so that a share of the decay is a harmless default for them.
    default_stable = int(DEFAULT_STABLE_SHARE * samples(config.decay))
    values: dict[str, Any] = {
        "max_lr": run.optimizer.params.lr,
        "min_lr": config.min_lr,
        "warmup_samples": end(samples(config.warmup)),
        "stable_samples": default_stable if config.stable is None else samples(config.stable),
        "end_samples": end(samples(config.decay)),
        "step_interval_samples": samples(config.step_interval or DEFAULT_STEP_INTERVAL),
        "step_factor": config.step_factor or DEFAULT_STEP_FACTOR,
    }
    schedule = LR_SCHEDULES[config.type]
    # Every schedule declares which of these it reads as the fields of its dataclass.
    return schedule(**{field.name: values[field.name] for field in fields(schedule)})


def run_layout(run: RunConfig, world_size: int) -> ParallelLayout:
    """Lay ``run`` out over ``world_size`` processes.

    Raises:
        UserError: the stages and tensor ranks do not divide the world, or the file asks for another one.
    """
    sections = run.megastable
    return ParallelLayout.of_world(
        world_size,
        sections.pipeline.num_stages,
        sections.tensor_parallel.size,
        expected_world_size=sections.training.world_size,
    )


def recomputation(run: RunConfig) -> Recomputation:
    """Return what the backward passes of a run compute again."""
    settings = run.megastable
    return Recomputation(settings.pipeline.recomputed_kinds, head=settings.training.loss_chunk_tokens is not None)


def load_run(path: Path, asked: int | None, overrides: Sequence[str] = ()) -> tuple[RunConfig, int]:
    """Read a run file, and return it with its number of devices; the file is not checked against their layout.

    Args:
        asked: devices; None as in ``number_of_devices``.
        overrides: of keys of the file, see ``load_run_file``.

    Raises:
        UserError: the file cannot be read or holds faults.
    """
    run = load_run_file(path, overrides)
    devices, _ = number_of_devices(run, asked)
    return run, devices


def number_of_devices(run: RunConfig, asked: int | None) -> tuple[int, bool]:
    """Return the number of devices to plan a run for, and whether it is only assumed.

    Args:
        asked: devices; None for as many as the run file asks for, else the fewest that hold its stages and tensor
            ranks.
    """
    given = asked or run.megastable.training.world_size
    if given:
        return given, False
    return fewest_devices(run), True


def fewest_devices(run: RunConfig) -> int:
    """Return the devices of one replica: all stages, with all their tensor ranks."""
    # Any other number of devices is a multiple of it, so that none is legal without this one.
    return run.megastable.pipeline.num_stages * run.megastable.tensor_parallel.size
