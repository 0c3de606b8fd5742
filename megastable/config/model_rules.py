"""Rules between keys of the model and the layout. A rule's parameters say, by their types, which sections it needs."""

from __future__ import annotations

from collections.abc import Iterator

from megastable.config.data import SMALLEST_BYTE_VOCAB, BpeTokenizerConfig, BytesTokenizerConfig, DataConfig
from megastable.config.faults import Fault
from megastable.config.model import ModelConfig
from megastable.config.sections import InitConfig, PipelineConfig, TensorParallelConfig, TrainingConfig


def heads_divide_hidden_size(model: ModelConfig) -> Iterator[Fault]:
    """Every attention head has the same whole width."""
    if model.hidden_size % model.num_attention_heads:
        yield Fault(
            "megastable.model.hidden_size",
            model.hidden_size,
            f"must be a multiple of num_attention_heads ({model.num_attention_heads})",
        )


def kv_heads_divide_heads(model: ModelConfig) -> Iterator[Fault]:
    """Every key and value head serves the same number of query heads."""
    if model.num_attention_heads % model.kv_heads:
        yield Fault(
            "megastable.model.num_key_value_heads",
            model.num_key_value_heads,
            f"must divide num_attention_heads ({model.num_attention_heads})",
        )


def rotary_needs_even_head_dim(model: ModelConfig) -> Iterator[Fault]:
    """Rotary embeddings turn pairs of channels."""
    divides = model.hidden_size % model.num_attention_heads == 0
    if model.position_embedding == "rotary" and divides and model.head_dim % 2:
        yield Fault(
            "megastable.model.position_embedding",
            model.position_embedding,
            f"rotary needs an even head width; hidden_size / num_attention_heads is {model.head_dim}",
        )


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


def std_belongs_to_fixed(init: InitConfig) -> Iterator[Fault]:
    """The other schemes compute the std from the width, so a given one would be ignored."""
    if init.scheme == "fixed" and init.std is None:
        yield Fault("megastable.init.std", None, 'must be a number above 0 with the scheme "fixed"')
    if init.scheme != "fixed" and init.std is not None:
        yield Fault(
            "megastable.init.std", init.std, f'is only legal with the scheme "fixed", not "{init.scheme}"; remove it'
        )


def head_std_needs_a_head(init: InitConfig, model: ModelConfig) -> Iterator[Fault]:
    """A tied head has the embedding's weights."""
    if init.head_std is not None and model.tie_embeddings:
        yield Fault("megastable.init.head_std", init.head_std, "needs megastable.model.tie_embeddings to be false")


def capped_attention_is_plain(model: ModelConfig) -> Iterator[Fault]:
    """The fused kernel has no place for the cap."""
    if model.attention_logit_cap is not None and model.attention == "sdpa":
        yield Fault("megastable.model.attention", "sdpa", "must be auto or math with attention_logit_cap")


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
