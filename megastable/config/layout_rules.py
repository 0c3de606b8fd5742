"""Rules that need the number of processes, so that a launch hears of every fault in one message."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from megastable.config import run_rules
from megastable.config.batch_rampup import BatchRampupConfig
from megastable.config.faults import NO_VALUE, Fault
from megastable.config.section import Section
from megastable.config.sections import PipelineConfig, TensorParallelConfig, TrainingConfig
from megastable.core.batch_rampup import BatchDivisionError
from megastable.core.errors import UserError
from megastable.core.layout import ParallelLayout


class LaunchedRun(Section):
    """What the layout of a launch needs beside the sections of the file; no part of the file itself."""

    world_size: int = Field(ge=1)
    micro_batch_size: int = Field(ge=1)


def auto_starts_from_one_sample(launched: LaunchedRun, batch_rampup: BatchRampupConfig) -> Iterator[Fault]:
    """A size that "auto" would not read is not given. Until the choice is made every batch is split by it."""
    if batch_rampup.chooses_micro_batch_sizes and launched.micro_batch_size != 1:
        yield Fault(
            "train_micro_batch_size_per_gpu",
            launched.micro_batch_size,
            'is not read with megastable.batch_rampup.micro_batch_size "auto"; remove it (an override sets it to 1)',
        )


def processes_are_whole_replicas(
    launched: LaunchedRun, pipeline: PipelineConfig, tensor_parallel: TensorParallelConfig, training: TrainingConfig
) -> Iterator[Fault]:
    """Stages x tensor ranks divide the processes, and they are as many as the file asks for."""
    try:
        _layout(launched, pipeline, tensor_parallel, training)
    except UserError as error:
        yield Fault("", NO_VALUE, str(error))


def batches_divide_among_replicas(
    launched: LaunchedRun,
    pipeline: PipelineConfig,
    tensor_parallel: TensorParallelConfig,
    training: TrainingConfig,
    batch_rampup: BatchRampupConfig,
) -> Iterator[Fault]:
    """Every batch of the ramp is a multiple of micro-batch size x replicas; only told of a sound layout and ramp."""
    broken = (
        *run_rules.ramp_has_one_form(batch_rampup),
        *run_rules.ramp_reaches_final(batch_rampup),
        *run_rules.ramp_steps_rise(batch_rampup),
        *run_rules.micro_batch_steps_rise(batch_rampup),
        *run_rules.auto_chooses_every_size(batch_rampup),
        *auto_starts_from_one_sample(launched, batch_rampup),
        *run_rules.one_run_length(training),
        *processes_are_whole_replicas(launched, pipeline, tensor_parallel, training),
    )
    if broken:
        return
    layout = _layout(launched, pipeline, tensor_parallel, training)
    try:
        batch_rampup.ramp(launched.micro_batch_size, layout.data_parallel_size).phases(
            total_samples=training.total_samples, total_steps=training.total_steps
        )
    except BatchDivisionError as error:
        yield from (Fault("megastable.batch_rampup", NO_VALUE, fault) for fault in error.faults)


def _layout(
    launched: LaunchedRun, pipeline: PipelineConfig, tensor_parallel: TensorParallelConfig, training: TrainingConfig
) -> ParallelLayout:
    return ParallelLayout.of_world(
        launched.world_size, pipeline.num_stages, tensor_parallel.size, expected_world_size=training.world_size
    )
