"""The model section of a run file, and the rules between its keys.

A rule's parameters say, by their types, which sections it needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pydantic import Field, ValidationInfo, field_validator
from pydantic_core import PydanticKnownError

from megastable.config.reading.faults import Fault
from megastable.config.section import Section
from megastable.core.model_parts import (
    ATTENTION_KINDS,
    FEED_FORWARD_KINDS,
    NORM_KINDS,
    POSITION_KINDS,
)

KINDS: dict[str, Mapping[str, object]] = {
    "position_embedding": POSITION_KINDS,
    "norm": NORM_KINDS,
    "activation": FEED_FORWARD_KINDS,
    "attention": ATTENTION_KINDS,
}
"""Key that names a part of the model -> the kinds that there are."""


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
    position_embedding: str = Field(
        default="rotary",
        json_schema_extra={"enum": list(POSITION_KINDS)},
        description="How a token knows its position.",
    )
    rotary_base: float = Field(default=10000.0, gt=0, description="Base of the rotary wavelengths.")
    norm: str = Field(
        default="layernorm", json_schema_extra={"enum": list(NORM_KINDS)}, description="Kind of every norm."
    )
    norm_eps: float = Field(default=1e-5, gt=0, description="Added to the variance in every norm.")
    activation: str = Field(
        default="gelu", json_schema_extra={"enum": list(FEED_FORWARD_KINDS)}, description="Kind of feed-forward layer."
    )
    embedding_norm: bool = Field(
        default=False, description="A norm after the embedding, as in BLOOM; steadies large fp16 and bf16 runs."
    )
    tie_embeddings: bool = Field(default=True, description="The head shares the embedding's weights.")
    dropout: float = Field(
        default=0.0, ge=0, lt=1, description="Share of values dropped in the embedding, attention and residuals."
    )
    attention: str = Field(
        default="auto",
        json_schema_extra={"enum": list(ATTENTION_KINDS)},
        description="Attention backend; auto takes the fastest that fits the model and device.",
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

    @field_validator(*KINDS, mode="before")
    @classmethod
    def _names_a_kind(cls, value: object, info: ValidationInfo) -> object:
        # The registry is read when a file is, not when this module is imported: a kind may be added in between.
        names = list(KINDS[str(info.field_name)])
        if value not in names:
            *others, last = (repr(name) for name in names)
            expected = f"{', '.join(others)} or {last}"
            raise PydanticKnownError("literal_error", {"expected": expected})
        return value

    @property
    def kv_heads(self) -> int:
        """Return the number of key and value heads."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_dim(self) -> int:
        """Return the width of one attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def ffn_size(self) -> int:
        """Return the inner width of the feed-forward layers."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        return FEED_FORWARD_KINDS[self.activation].default_inner_size(self.hidden_size)

    @property
    def padded_vocab_size(self) -> int:
        """Return the rows of the embedding: ``vocab_size``, rounded up to a multiple of ``vocab_padding_multiple``."""
        multiple = self.vocab_padding_multiple
        return -(-self.vocab_size // multiple) * multiple


def heads_divide_hidden_size(model: ModelConfig) -> Iterator[Fault]:
    """Refuse heads whose width is no whole number, which all heads share."""
    if model.hidden_size % model.num_attention_heads:
        yield Fault(
            "megastable.model.hidden_size",
            model.hidden_size,
            f"must be a multiple of num_attention_heads ({model.num_attention_heads})",
        )


def kv_heads_divide_heads(model: ModelConfig) -> Iterator[Fault]:
    """Refuse key and value heads that do not all serve the same number of query heads."""
    if model.num_attention_heads % model.kv_heads:
        yield Fault(
            "megastable.model.num_key_value_heads",
            model.num_key_value_heads,
            f"must divide num_attention_heads ({model.num_attention_heads})",
        )


def rotary_needs_even_head_dim(model: ModelConfig) -> Iterator[Fault]:
    """Refuse an odd head width where the position embedding turns the channels of a head in pairs."""
    kind = POSITION_KINDS[model.position_embedding]
    divides = model.hidden_size % model.num_attention_heads == 0  # else ``heads_divide_hidden_size`` has its fault
    if kind.needs_even_head_dim and divides and model.head_dim % 2:
        name = model.position_embedding
        yield Fault(
            "megastable.model.position_embedding",
            name,
            f"{name} needs an even head width; hidden_size / num_attention_heads is {model.head_dim}",
        )


def capped_attention_is_plain(model: ModelConfig) -> Iterator[Fault]:
    """Refuse a backend that has no place for the cap beside a cap."""
    if model.attention_logit_cap is None or ATTENTION_KINDS[model.attention].allows_logit_cap:
        return
    legal = " or ".join(name for name, kind in ATTENTION_KINDS.items() if kind.allows_logit_cap)
    yield Fault("megastable.model.attention", model.attention, f"must be {legal} with attention_logit_cap")
