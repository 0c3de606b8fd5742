"""Rules of what tensor ranks have to divide. A rule's parameters say, by their types, which sections it needs."""

from __future__ import annotations

from collections.abc import Iterator

from megastable.config.faults import Fault
from megastable.config.model import ModelConfig
from megastable.config.sections import TensorParallelConfig, TrainingConfig


def tensor_ranks_divide_the_model(model: ModelConfig, tensor_parallel: TensorParallelConfig) -> Iterator[Fault]:
    """Every split width falls into equal parts, one for each tensor rank."""
    size = tensor_parallel.size
    divided = {
        "num_attention_heads": (model.num_attention_heads, ""),
        "ffn_hidden_size": (model.ffn_size, ""),
        "vocab_size": (model.padded_vocab_size, " once padded; choose another vocab_padding_multiple"),
    }
    if tensor_parallel.sequence_parallel:
        divided["seq_length"] = (model.seq_length, " under sequence_parallel")
    for key, (value, note) in divided.items():
        if value % size:
            legal = f"must be a multiple of megastable.tensor_parallel.size ({size}){note}"
            yield Fault(f"megastable.model.{key}", value, legal)


def tensor_ranks_divide_kv_heads(model: ModelConfig, tensor_parallel: TensorParallelConfig) -> Iterator[Fault]:
    """A rank has whole key-value heads, or several ranks share one; then each projects a part of its features."""
    size, heads = tensor_parallel.size, model.kv_heads
    shared = size % heads == 0 and 2 * heads * model.head_dim % size == 0
    if heads % size and not shared:
        yield Fault(
            "megastable.model.num_key_value_heads",
            heads,
            f"must be a multiple or a divisor of megastable.tensor_parallel.size ({size})",
        )


def sequence_parallel_needs_tensor_ranks(tensor_parallel: TensorParallelConfig) -> Iterator[Fault]:
    """With one rank there is nothing to split, and the key would be ignored."""
    if tensor_parallel.sequence_parallel and tensor_parallel.size == 1:
        yield Fault(
            "megastable.tensor_parallel.sequence_parallel", True, "needs megastable.tensor_parallel.size above 1"
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


def compiled_blocks_are_whole(model: ModelConfig, tensor_parallel: TensorParallelConfig) -> Iterator[Fault]:
    """torch.compile does not see through the collectives of split layers."""
    if model.compile and tensor_parallel.size > 1:
        yield Fault(
            "megastable.model.compile",
            True,
            f"must be false with megastable.tensor_parallel.size above 1 ({tensor_parallel.size})",
        )
