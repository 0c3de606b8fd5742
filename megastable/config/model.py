"""The model's shape and parts.

Rules between keys of the model and the layout. A rule's parameters say, by their types, which sections it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

from pydantic import Field

from megastable.config.reading.faults import Fault
from megastable.config.section import Section

SWIGLU_SIZE_MULTIPLE = 64


class ModelConfig(Section):
    """A GPT: embedding, ``num_layers`` blocks, final norm, head."""

    num_layers: int = Field(ge=1, description="Transformer blocks in the whole model.")
    hidden_size: int = Field(ge=1, description="Width of the residual stream.")
    num_attention_heads: int = Field(ge=1, description="Query heads; must divide hidden_size.")
    num_key_value_heads: int | None = Field(
        default=None,
        ge=1,
        description="Key and value heads; must divide num_attention_heads. null: num_attention_heads.",
    )
    ffn_hidden_size: int | None = Field(
        default=None,
        ge=1,
        description="Inner width of the feed-forward layers. null: 4 x hidden_size for gelu; for swiglu "
        "8/3 x hidden_size, rounded up to a multiple of 64 (about the same number of weights).",
    )
    seq_length: int = Field(ge=1, description="Tokens of one sample.")
    vocab_size: int = Field(ge=1, description="Token ids that the data may hold, before padding.")
    vocab_padding_multiple: int = Field(
        default=128, ge=1, description="The embedding has vocab_size rows, rounded up to a multiple of this."
    )
    position_embedding: Literal["learned", "rotary", "alibi"] = Field(
        default="rotary", description="How a token knows its position."
    )
    rotary_base: float = Field(default=10000.0, gt=0, description="Base of the rotary wavelengths.")
    norm: Literal["layernorm", "rmsnorm"] = Field(default="layernorm", description="Kind of every norm.")
    norm_eps: float = Field(default=1e-5, gt=0, description="Added to the variance in every norm.")
    activation: Literal["gelu", "swiglu"] = Field(default="gelu", description="Kind of feed-forward layer.")
    embedding_norm: bool = Field(
        default=False, description="A norm after the embedding, as in BLOOM; steadies large fp16 and bf16 runs."
    )
    tie_embeddings: bool = Field(default=True, description="The head shares the embedding's weights.")
    dropout: float = Field(
        default=0.0, ge=0, lt=1, description="Share of values dropped in the embedding, attention and residuals."
    )
    attention: Literal["auto", "sdpa", "math"] = Field(
        default="auto", description="Attention backend; auto takes the fastest that fits the model and device."
    )
    qk_norm: bool = Field(
        default=False,
        description="A norm over each head's query and key before their product, which bounds the logits.",
    )
    attention_logit_cap: float | None = Field(
        default=None,
        gt=0,
        description="Attention logits x become cap * tanh(x / cap), by the math backend, as auto then does. null: off.",
    )
    output_logit_cap: float | None = Field(
        default=None, gt=0, description="The same for the logits of the vocabulary. null: off."
    )
    compile: bool = Field(
        default=False,
        description="torch.compile of every block, where it pays; the first steps are slow. Resuming may change it.",
    )

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def ffn_size(self) -> int:
        """Inner width of the feed-forward layers."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        return DEFAULT_FFN_SIZES[self.activation](self.hidden_size)

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding: ``vocab_size`` rounded up to a multiple of ``vocab_padding_multiple``."""
        return _round_up(self.vocab_size, self.vocab_padding_multiple)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _gelu_ffn_size(hidden_size: int) -> int:
    return 4 * hidden_size


def _swiglu_ffn_size(hidden_size: int) -> int:
    return _round_up(-(-8 * hidden_size // 3), SWIGLU_SIZE_MULTIPLE)


DEFAULT_FFN_SIZES: dict[str, Callable[[int], int]] = {"gelu": _gelu_ffn_size, "swiglu": _swiglu_ffn_size}
"""Activation -> the feed-forward layers' inner width for a hidden size."""


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
    if model.position_embedding == "rotary" and model.head_dim % 2:
        yield Fault(
            "megastable.model.position_embedding",
            model.position_embedding,
            f"rotary needs an even head width; hidden_size / num_attention_heads is {model.head_dim}",
        )


def capped_attention_is_plain(model: ModelConfig) -> Iterator[Fault]:
    """The fused kernel has no place for the cap."""
    if model.attention_logit_cap is not None and model.attention == "sdpa":
        yield Fault("megastable.model.attention", "sdpa", "must be auto or math with attention_logit_cap")
