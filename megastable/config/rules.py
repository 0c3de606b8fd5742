"""Rules between keys of the ramp, the schedule, the optimizer and the number formats.

A rule's parameters say, by their types, which sections it needs.

Rules that need the number of processes, so that a launch hears of every fault in one message.

The registry of rules between keys, and running those whose sections are there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import get_type_hints

from pydantic import Field

from megastable.config.batch_rampup import (
    BatchRampupConfig,
    auto_chooses_every_size,
    auto_goes_by_a_calibration,
    micro_batch_steps_rise,
    ramp_has_one_form,
    ramp_reaches_final,
    ramp_steps_rise,
)
from megastable.config.data import SMALLEST_BYTE_VOCAB, BpeTokenizerConfig, BytesTokenizerConfig, DataConfig
from megastable.config.deepspeed_keys import (
    OptimizerConfig,
    accumulation_fits_the_format,
    adamw_decouples_weight_decay,
    loss_scale_starts_above_minimum,
    one_number_format,
)
from megastable.config.lr_schedule import LrScheduleConfig, lr_keys_belong_to_the_type
from megastable.config.model import (
    ModelConfig,
    capped_attention_is_plain,
    heads_divide_hidden_size,
    kv_heads_divide_heads,
    rotary_needs_even_head_dim,
)
from megastable.config.parallelism import (
    PipelineConfig,
    TensorParallelConfig,
    compiled_blocks_are_whole,
    sequence_parallel_needs_tensor_ranks,
    tensor_ranks_divide_kv_heads,
    tensor_ranks_divide_the_model,
)
from megastable.config.reading.faults import NO_VALUE, Fault
from megastable.config.section import Amount, Section
from megastable.config.stages import (
    block_counts_make_the_model,
    every_stage_has_weights,
    no_more_stages_than_layers,
    type_matches_a_class,
)
from megastable.config.training import InitConfig, TrainingConfig, one_run_length, std_belongs_to_fixed
from megastable.core.batch_rampup import BatchDivisionError
from megastable.core.errors import UserError
from megastable.core.layout import ParallelLayout


def min_lr_is_not_above_lr(optimizer: OptimizerConfig, lr_schedule: LrScheduleConfig) -> Iterator[Fault]:
    """The decay goes down."""
    if lr_schedule.min_lr > optimizer.params.lr:
        yield Fault(
            "megastable.lr_schedule.min_lr",
            lr_schedule.min_lr,
            f"must be at most optimizer.params.lr ({optimizer.params.lr})",
        )


def warmup_ends_before_decay(
    lr_schedule: LrScheduleConfig, training: TrainingConfig, model: ModelConfig
) -> Iterator[Fault]:
    """The warmup is over when the decay is."""
    warmup, decay = lr_schedule.warmup, lr_schedule.decay
    if lr_schedule.reads("decay") and _ends_later(warmup, decay, training, model):
        yield Fault(
            "megastable.lr_schedule.warmup",
            warmup.model_dump(),
            f"must end before the decay does ({decay.model_dump()}); both are counted from the start of the run",
        )


def stable_ends_between(lr_schedule: LrScheduleConfig, training: TrainingConfig, model: ModelConfig) -> Iterator[Fault]:
    """The constant part begins with the end of the warmup, and the decay with its own."""
    warmup, stable, decay = lr_schedule.warmup, lr_schedule.stable, lr_schedule.decay
    if stable is None or not lr_schedule.reads("stable") or _ends_later(warmup, decay, training, model):
        return
    if _ends_later(warmup, stable, training, model) or _ends_later(stable, decay, training, model):
        yield Fault(
            "megastable.lr_schedule.stable",
            stable.model_dump(),
            f"must lie between the end of the warmup ({warmup.model_dump()}) and that of the decay "
            f"({decay.model_dump()}); all are counted from the start of the run",
        )


def _ends_later(first: Amount, second: Amount, training: TrainingConfig, model: ModelConfig) -> bool:
    """True where ``first`` is known to be more than ``second`` without expanding the ramp."""
    if first.fraction is not None and second.fraction is not None:
        return first.fraction > second.fraction
    total_samples = training.total_samples
    if total_samples is None:
        if first.fraction is not None or second.fraction is not None:
            return False
        total_samples = 0  # Not looked at: neither is a share of it.
    return first.to_samples(total_samples, model.seq_length) > second.to_samples(total_samples, model.seq_length)


def world_size_holds_whole_replicas(
    training: TrainingConfig, pipeline: PipelineConfig, tensor_parallel: TensorParallelConfig
) -> Iterator[Fault]:
    """World size = stages x data-parallel replicas x tensor size."""
    if training.world_size is not None and training.world_size % (pipeline.num_stages * tensor_parallel.size):
        yield Fault(
            "megastable.training.world_size",
            training.world_size,
            f"must be a multiple of megastable.pipeline.num_stages ({pipeline.num_stages}) x "
            f"megastable.tensor_parallel.size ({tensor_parallel.size})",
        )


def head_std_needs_a_head(init: InitConfig, model: ModelConfig) -> Iterator[Fault]:
    """A tied head has the embedding's weights."""
    if init.head_std is not None and model.tie_embeddings:
        yield Fault("megastable.init.head_std", init.head_std, "needs megastable.model.tie_embeddings to be false")


def bpe_fits_the_model(data: DataConfig, model: ModelConfig) -> Iterator[Fault]:
    """The model has a row for every token that the BPE learns, and the BPE has room for every byte."""
    if not isinstance(data.tokenizer, BpeTokenizerConfig):
        return
    if data.tokenizer.vocab_size is None and model.vocab_size < SMALLEST_BYTE_VOCAB:
        yield Fault(
            "megastable.model.vocab_size",
            model.vocab_size,
            f"must be at least {SMALLEST_BYTE_VOCAB} for a bpe tokenizer: the bytes and the end-of-document token",
        )
    if data.tokenizer.vocab_size is not None and data.tokenizer.vocab_size > model.vocab_size:
        yield Fault(
            "megastable.data.tokenizer.vocab_size",
            data.tokenizer.vocab_size,
            f"must be at most megastable.model.vocab_size ({model.vocab_size})",
        )


def bytes_fit_the_model(data: DataConfig, model: ModelConfig) -> Iterator[Fault]:
    """The model has a row for every byte and the end-of-document token."""
    if isinstance(data.tokenizer, BytesTokenizerConfig) and model.vocab_size < SMALLEST_BYTE_VOCAB:
        yield Fault(
            "megastable.model.vocab_size",
            model.vocab_size,
            f"must be at least {SMALLEST_BYTE_VOCAB} for the bytes tokenizer: the bytes and the end-of-document token",
        )


def evaluation_needs_validation_data(data: DataConfig, training: TrainingConfig) -> Iterator[Fault]:
    """An evaluation of nothing would pass silently."""
    if training.eval_interval > 0 and data.validation_fraction == 0:
        yield Fault(
            "megastable.training.eval_interval",
            training.eval_interval,
            "must be 0, or megastable.data.validation_fraction above 0: there is nothing to evaluate on",
        )


def loss_chunks_hold_every_slice(training: TrainingConfig, tensor_parallel: TensorParallelConfig) -> Iterator[Fault]:
    """Under sequence parallelism a chunk has tokens from the slice of every rank."""
    chunk, size = training.loss_chunk_tokens, tensor_parallel.size
    if tensor_parallel.sequence_parallel and chunk is not None and chunk < size:
        yield Fault(
            "megastable.training.loss_chunk_tokens",
            chunk,
            f"must be at least megastable.tensor_parallel.size ({size}) under sequence_parallel",
        )


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
        *ramp_has_one_form(batch_rampup),
        *ramp_reaches_final(batch_rampup),
        *ramp_steps_rise(batch_rampup),
        *micro_batch_steps_rise(batch_rampup),
        *auto_chooses_every_size(batch_rampup),
        *auto_starts_from_one_sample(launched, batch_rampup),
        *one_run_length(training),
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


Rule = Callable[..., Iterator[Fault]]

RULES: tuple[Rule, ...] = (
    heads_divide_hidden_size,
    kv_heads_divide_heads,
    rotary_needs_even_head_dim,
    no_more_stages_than_layers,
    block_counts_make_the_model,
    type_matches_a_class,
    every_stage_has_weights,
    world_size_holds_whole_replicas,
    std_belongs_to_fixed,
    head_std_needs_a_head,
    capped_attention_is_plain,
    bpe_fits_the_model,
    bytes_fit_the_model,
    evaluation_needs_validation_data,
    tensor_ranks_divide_the_model,
    tensor_ranks_divide_kv_heads,
    sequence_parallel_needs_tensor_ranks,
    loss_chunks_hold_every_slice,
    compiled_blocks_are_whole,
    ramp_has_one_form,
    ramp_reaches_final,
    ramp_steps_rise,
    micro_batch_steps_rise,
    auto_goes_by_a_calibration,
    auto_chooses_every_size,
    one_run_length,
    one_number_format,
    accumulation_fits_the_format,
    loss_scale_starts_above_minimum,
    adamw_decouples_weight_decay,
    min_lr_is_not_above_lr,
    lr_keys_belong_to_the_type,
    warmup_ends_before_decay,
    stable_ends_between,
    auto_starts_from_one_sample,
    processes_are_whole_replicas,
    batches_divide_among_replicas,
)
"""To add a rule: a function whose parameters are typed with the sections that it needs, and a line here."""


def broken_rules(sections: Mapping[type[Section], Section]) -> Iterator[Fault]:
    """Run every rule whose sections are among ``sections`` (section type -> its valid instance)."""
    for rule in RULES:
        needs = {name: kind for name, kind in get_type_hints(rule).items() if name != "return"}
        if all(kind in sections for kind in needs.values()):
            yield from rule(**{name: sections[kind] for name, kind in needs.items()})
