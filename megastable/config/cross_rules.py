"""Rules across sections of a run file, and those of its launch on a number of processes.

A rule's parameters say, by their types, which sections it reads; ``rules.py`` says which rules have to hold before.
"""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from megastable.config.batch_rampup import BatchRampupConfig
from megastable.config.data import (
    SMALLEST_BYTE_VOCAB,
    BpeTokenizerConfig,
    BytesTokenizerConfig,
    DataConfig,
    states_validation,
)
from megastable.config.deepspeed_keys import (
    ACCUMULATION_DTYPES,
    Bf16Config,
    DataTypesConfig,
    Fp16Config,
    OptimizerConfig,
    weight_format,
)
from megastable.config.limits import LARGEST_BATCH
from megastable.config.lr_schedule import LrScheduleConfig
from megastable.config.model import ModelConfig
from megastable.config.parallelism import PipelineConfig, TensorParallelConfig
from megastable.config.reading.faults import NO_VALUE, Fault
from megastable.config.section import Amount, Section
from megastable.config.training import CheckpointConfig, InitConfig, TrainingConfig
from megastable.core.batch_rampup import BatchDivisionError
from megastable.core.errors import UserError
from megastable.core.layout import ParallelLayout


def one_number_format(fp16: Fp16Config, bf16: Bf16Config) -> Iterator[Fault]:
    """Require one format for the whole model."""
    if fp16.enabled and bf16.enabled:
        yield Fault("bf16.enabled", True, "fp16.enabled is true as well; enable one of them, or neither for float32")


def accumulation_fits_the_format(fp16: Fp16Config, bf16: Bf16Config, data_types: DataTypesConfig) -> Iterator[Fault]:
    """Require that gradients are accumulated in the format of the weights or in float32."""
    # In the other 16-bit format sums would lose range (bf16 gradients in fp16) or digits (fp16 gradients in bf16).
    weights = weight_format(fp16, bf16)
    legal = ACCUMULATION_DTYPES[weights]
    if data_types.grad_accum_dtype not in (None, *legal):
        yield Fault(
            "data_types.grad_accum_dtype",
            data_types.grad_accum_dtype,
            f"must be {' or '.join(legal)} in a run with {weights} weights",
        )


def min_lr_is_not_above_lr(optimizer: OptimizerConfig, lr_schedule: LrScheduleConfig) -> Iterator[Fault]:
    """Require that the decay goes down."""
    if lr_schedule.min_lr > optimizer.params.lr:
        yield Fault(
            "megastable.lr_schedule.min_lr",
            lr_schedule.min_lr,
            f"must be at most optimizer.params.lr ({optimizer.params.lr})",
        )


def some_step_has_a_learning_rate(
    lr_schedule: LrScheduleConfig, training: TrainingConfig, model: ModelConfig
) -> Iterator[Fault]:
    """Refuse a decay to 0 that is over before the first sample: every step of the run would have the minimum, 0."""
    if not lr_schedule.reads("decay") or lr_schedule.min_lr > 0:
        return
    # A warmup never outlasts the decay (another rule), so that with such a decay there is none either.
    if _is_no_sample(lr_schedule.decay, training, model):
        yield Fault(
            "megastable.lr_schedule.decay",
            lr_schedule.decay.model_dump(),
            "ends before the first sample, and min_lr is 0: the learning rate would be 0 at every step; give the decay "
            'a length, a min_lr above 0, or leave it out and write the type "constant"',
        )


def _is_no_sample(amount: Amount, training: TrainingConfig, model: ModelConfig) -> bool:
    """Tell whether an amount is known to be less than one sample without expanding the ramp."""
    # Of a run of so many steps a share is known to be no sample only where it is no share; see ``_ends_later``.
    if amount.fraction is not None and training.total_samples is None:
        return amount.fraction == 0
    return amount.to_samples(training.total_samples or 0, model.seq_length) == 0


def warmup_ends_before_decay(
    lr_schedule: LrScheduleConfig, training: TrainingConfig, model: ModelConfig
) -> Iterator[Fault]:
    """Require that the warmup is over when the decay is."""
    warmup = lr_schedule.warmup
    decay = lr_schedule.decay
    # A constant schedule has no decay: its key stands at the default, wherever the warmup ends.
    if lr_schedule.reads("decay") and _ends_later(warmup, decay, training, model):
        yield Fault(
            "megastable.lr_schedule.warmup",
            warmup.model_dump(),
            f"must end before the decay does ({decay.model_dump()}); both are counted from the start of the run",
        )


def stable_ends_between(lr_schedule: LrScheduleConfig, training: TrainingConfig, model: ModelConfig) -> Iterator[Fault]:
    """Require that the constant part ends between the end of the warmup and that of the decay."""
    warmup = lr_schedule.warmup
    stable = lr_schedule.stable
    decay = lr_schedule.decay
    if stable is None or not lr_schedule.reads("stable"):
        return
    if _ends_later(warmup, stable, training, model) or _ends_later(stable, decay, training, model):
        yield Fault(
            "megastable.lr_schedule.stable",
            stable.model_dump(),
            f"must lie between the end of the warmup ({warmup.model_dump()}) and that of the decay "
            f"({decay.model_dump()}); all are counted from the start of the run",
        )


def _ends_later(first: Amount, second: Amount, training: TrainingConfig, model: ModelConfig) -> bool:
    """Tell whether ``first`` is known to be more than ``second`` without expanding the ramp."""
    if first.fraction is not None and second.fraction is not None:
        return first.fraction > second.fraction
    total_samples = training.total_samples
    if total_samples is None:
        # A run of so many steps: how many samples a share of it is, only the expanded ramp knows.
        if first.fraction is not None or second.fraction is not None:
            return False
        total_samples = 0  # Not read: neither amount is a share of the run.
    return first.to_samples(total_samples, model.seq_length) > second.to_samples(total_samples, model.seq_length)


def world_size_holds_whole_replicas(
    training: TrainingConfig, pipeline: PipelineConfig, tensor_parallel: TensorParallelConfig
) -> Iterator[Fault]:
    """Require that world size = stages x data-parallel replicas x tensor size."""
    # Read from the file alone; processes_are_whole_replicas asks the same of the processes that a launch really has.
    if training.world_size is not None and training.world_size % (pipeline.num_stages * tensor_parallel.size):
        yield Fault(
            "megastable.training.world_size",
            training.world_size,
            f"must be a multiple of megastable.pipeline.num_stages ({pipeline.num_stages}) x "
            f"megastable.tensor_parallel.size ({tensor_parallel.size})",
        )


def tensor_ranks_divide_the_model(model: ModelConfig, tensor_parallel: TensorParallelConfig) -> Iterator[Fault]:
    """Require that every split width falls into equal parts, one for each tensor rank."""
    size = tensor_parallel.size
    # What a rank holds a part of: heads of the attention, columns of the feed-forward layer, rows of the embedding.
    divided = {
        "num_attention_heads": (model.num_attention_heads, ""),
        "ffn_hidden_size": (model.ffn_size, ""),
        "vocab_size": (model.padded_vocab_size, " once padded; choose another vocab_padding_multiple"),
    }
    # Between the layers the ranks hold slices of the sequence instead of whole copies.
    if tensor_parallel.sequence_parallel:
        divided["seq_length"] = (model.seq_length, " under sequence_parallel")
    for key, (value, note) in divided.items():
        if value % size:
            legal = f"must be a multiple of megastable.tensor_parallel.size ({size}){note}"
            yield Fault(f"megastable.model.{key}", value, legal)


def tensor_ranks_divide_kv_heads(model: ModelConfig, tensor_parallel: TensorParallelConfig) -> Iterator[Fault]:
    """Require that a tensor rank has whole key-value heads, or that several ranks share one evenly."""
    size = tensor_parallel.size
    heads = model.kv_heads
    # Ranks that share a head each project an equal part of the features of all keys and values.
    shared = size % heads == 0 and 2 * heads * model.head_dim % size == 0
    if heads % size and not shared:
        yield Fault(
            "megastable.model.num_key_value_heads",
            heads,
            f"must be a multiple or a divisor of megastable.tensor_parallel.size ({size})",
        )


def compiled_blocks_read_one_text(model: ModelConfig, data: DataConfig) -> Iterator[Fault]:
    """Refuse to compile blocks that are told of the documents of each micro-batch, which no compiled form takes in."""
    if model.compile and data.resets_at_documents:
        yield Fault(
            "megastable.model.compile",
            True,
            'must be false with megastable.data.packing "reset"; or packing "continuous"',
        )


def compiled_blocks_are_whole(model: ModelConfig, tensor_parallel: TensorParallelConfig) -> Iterator[Fault]:
    """Refuse to compile split layers: torch.compile does not see through their collectives."""
    if model.compile and tensor_parallel.size > 1:
        yield Fault(
            "megastable.model.compile",
            True,
            f"must be false with megastable.tensor_parallel.size above 1 ({tensor_parallel.size})",
        )


def loss_chunks_hold_every_slice(training: TrainingConfig, tensor_parallel: TensorParallelConfig) -> Iterator[Fault]:
    """Require that a chunk has a token from the slice of every rank under sequence parallelism."""
    chunk = training.loss_chunk_tokens
    size = tensor_parallel.size
    if tensor_parallel.sequence_parallel and chunk is not None and chunk < size:
        yield Fault(
            "megastable.training.loss_chunk_tokens",
            chunk,
            f"must be at least megastable.tensor_parallel.size ({size}) under sequence_parallel",
        )


def head_std_needs_a_head(init: InitConfig, model: ModelConfig) -> Iterator[Fault]:
    """Refuse a std for the head where it is tied, because its weights are the embedding's."""
    if init.head_std is not None and model.tie_embeddings:
        yield Fault("megastable.init.head_std", init.head_std, "needs megastable.model.tie_embeddings to be false")


def bpe_fits_the_model(data: DataConfig, model: ModelConfig) -> Iterator[Fault]:
    """Require a row of the embedding for every token that the BPE learns, and room in the BPE for every byte."""
    if not isinstance(data.tokenizer, BpeTokenizerConfig):
        return
    # Without a size of its own the BPE learns as many tokens as the model has.
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
    """Require a row of the embedding for every byte and the end-of-document token."""
    if isinstance(data.tokenizer, BytesTokenizerConfig) and model.vocab_size < SMALLEST_BYTE_VOCAB:
        yield Fault(
            "megastable.model.vocab_size",
            model.vocab_size,
            f"must be at least {SMALLEST_BYTE_VOCAB} for the bytes tokenizer: the bytes and the end-of-document token",
        )


def evaluation_needs_validation_data(data: DataConfig, training: TrainingConfig) -> Iterator[Fault]:
    """Refuse to evaluate on no documents, which would pass silently."""
    if training.eval_interval > 0 and data.validation_fraction == 0 and not states_validation(data.source):
        yield Fault(
            "megastable.training.eval_interval",
            training.eval_interval,
            "must be 0, or megastable.data.validation_fraction above 0: there is nothing to evaluate on",
        )


def best_checkpoints_need_evaluation(checkpoint: CheckpointConfig, training: TrainingConfig) -> Iterator[Fault]:
    """Refuse to keep the best of checkpoints that nothing tells apart."""
    if checkpoint.keep_best is not None and training.eval_interval == 0:
        yield Fault(
            "megastable.checkpoint.keep_best",
            checkpoint.keep_best,
            "needs megastable.training.eval_interval above 0: the best are those of the lowest validation loss",
        )


class LaunchedRun(Section):
    """What the layout of a launch needs beside the sections of the file; no part of the file itself."""

    world_size: int = Field(ge=1)
    micro_batch_size: int = Field(ge=1, le=LARGEST_BATCH)
    first_step: int = Field(ge=0)
    """Steps that a run which continues a checkpoint has done."""
    first_sample: int = Field(ge=0)


def auto_starts_from_one_sample(launched: LaunchedRun, batch_rampup: BatchRampupConfig) -> Iterator[Fault]:
    """Refuse a micro-batch size that "auto" would not read."""
    # Until "auto" has chosen, every batch is split by that size; only the default, 1, divides all of them.
    if batch_rampup.chooses_micro_batch_sizes and launched.micro_batch_size != 1:
        yield Fault(
            "train_micro_batch_size_per_gpu",
            launched.micro_batch_size,
            'is not read with megastable.batch_rampup.micro_batch_size "auto"; remove it (an override sets it to 1)',
        )


def processes_are_whole_replicas(
    launched: LaunchedRun, pipeline: PipelineConfig, tensor_parallel: TensorParallelConfig, training: TrainingConfig
) -> Iterator[Fault]:
    """Require that stages x tensor ranks divide the processes, and that they are as many as the file asks for."""
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
    """Require that every batch that the ramp still has is a multiple of micro-batch size x replicas.

    Only a sound ramp, run length and layout can be expanded; the registry lists the rules that make them so.
    """
    layout = _layout(launched, pipeline, tensor_parallel, training)
    try:
        batch_rampup.ramp(launched.micro_batch_size, layout.data_parallel_size).phases(
            total_samples=training.total_samples,
            total_steps=training.total_steps,
            first_step=launched.first_step,
            first_sample=launched.first_sample,
        )
    except BatchDivisionError as error:
        yield from (Fault("megastable.batch_rampup", NO_VALUE, fault) for fault in error.faults)


def _layout(
    launched: LaunchedRun, pipeline: PipelineConfig, tensor_parallel: TensorParallelConfig, training: TrainingConfig
) -> ParallelLayout:
    return ParallelLayout.of_world(
        launched.world_size, pipeline.num_stages, tensor_parallel.size, expected_world_size=training.world_size
    )
