"""The model section of a run file, and the rules between its keys.

A rule's parameters say, by their types, which sections it needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field, model_validator

from megastable.config.limits import (
    LARGEST_FACTOR,
    LARGEST_INNER_WIDTH,
    LARGEST_VOCABULARY,
    LARGEST_WIDTH,
    LONGEST_SEQUENCE,
    MOST_LAYERS,
)
from megastable.config.reading.faults import Fault
from megastable.config.section import RegisteredName, Section
from megastable.core.families.registry import FAMILIES
from megastable.core.model_parts import ATTENTION_KINDS, FEED_FORWARD_KINDS, NORM_KINDS, POSITION_KINDS


class ModelConfig(Section):
    """A GPT: embedding, ``num_layers`` blocks, final norm, head."""

    family: Annotated[str, RegisteredName(FAMILIES)] | None = Field(
        default=None,
        description="A class of `transformers` that the model maps onto exactly: sets the keys that the class fixes, "
        "where they are not given, and refuses others. null: no class decides.",
    )
    num_layers: int = Field(ge=1, le=MOST_LAYERS, description="Transformer blocks in the whole model.")
    hidden_size: int = Field(ge=1, le=LARGEST_WIDTH, description="Width of the residual stream.")
    num_attention_heads: int = Field(ge=1, le=LARGEST_WIDTH, description="Query heads; must divide hidden_size.")
    num_key_value_heads: int | None = Field(
        default=None,
        ge=1,
        le=LARGEST_WIDTH,
        description="Key and value heads; must divide num_attention_heads. null: num_attention_heads.",
    )
    ffn_hidden_size: int | None = Field(
        default=None,
        ge=1,
        le=LARGEST_INNER_WIDTH,
        description="Inner width of the feed-forward layers. null: 4 x hidden_size for gelu; for swiglu "
        "8/3 x hidden_size, rounded up to a multiple of 64 (about the same number of weights).",
    )
    seq_length: int = Field(ge=1, le=LONGEST_SEQUENCE, description="Tokens of one sample.")
    vocab_size: int = Field(
        ge=1, le=LARGEST_VOCABULARY, description="Token ids that the data may hold, before padding."
    )
    vocab_padding_multiple: int = Field(
        default=128,
        ge=1,
        le=LARGEST_VOCABULARY,
        description="The embedding has vocab_size rows, rounded up to a multiple of this.",
    )
    position_embedding: Annotated[str, RegisteredName(POSITION_KINDS)] = Field(
        default="rotary",
        description="How a token knows its position.",
    )
    rotary_base: float = Field(default=10000.0, gt=0, le=1e12, description="Base of the rotary wavelengths.")
    rotary_fraction: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Share of each head's channels that rotary positions turn, the first ones; rounded down to a whole "
        "number, which must be even.",
    )
    norm: Annotated[str, RegisteredName(NORM_KINDS)] = Field(default="layernorm", description="Kind of every norm.")
    norm_eps: float = Field(default=1e-5, gt=0, le=1, description="Added to the variance in every norm.")
    activation: Annotated[str, RegisteredName(FEED_FORWARD_KINDS)] = Field(
        default="gelu",
        description="Kind of feed-forward layer; gelu is the usual approximation by tanh, gelu_exact the function.",
    )
    linear_biases: bool = Field(
        default=True, description="Biases on all linear layers of the blocks; the head never has one."
    )
    parallel_residual: bool = Field(
        default=False,
        description="Attention and feed-forward layer of a block read the same input, each with a norm of its own, and "
        "both are added to it, as in GPT-NeoX. false: one after the other.",
    )
    embedding_norm: bool = Field(
        default=False, description="A norm after the embedding, as in BLOOM; steadies large fp16 and bf16 runs."
    )
    tie_embeddings: bool = Field(default=True, description="The head shares the embedding's weights.")
    dropout: float = Field(
        default=0.0, ge=0, lt=1, description="Share of values dropped in the embedding, attention and residuals."
    )
    attention: Annotated[str, RegisteredName(ATTENTION_KINDS)] = Field(
        default="auto",
        description="Attention backend; auto takes the fastest that fits the model and device.",
    )
    qk_norm: bool = Field(
        default=False,
        description="A norm over each head's query and key before their product, which bounds the logits.",
    )
    attention_logit_cap: float | None = Field(
        default=None,
        gt=0,
        le=LARGEST_FACTOR,
        description="Attention logits x become cap * tanh(x / cap), by the math backend, as auto then does. null: off.",
    )
    output_logit_cap: float | None = Field(
        default=None, gt=0, le=LARGEST_FACTOR, description="The same for the logits of the vocabulary. null: off."
    )
    compile: bool = Field(
        default=False,
        description="torch.compile of every block, where it pays; the first steps are slow. Resuming may change it.",
    )

    @model_validator(mode="before")
    @classmethod
    def _family_sets_what_is_not_given(cls, values: Any) -> Any:
        # Whatever is wrong with the values is said by the checks that follow.
        if not isinstance(values, dict) or values.get("family") not in list(FAMILIES):
            return values
        return {**FAMILIES[values["family"]].presets(), **values}

    @property
    def kv_heads(self) -> int:
        """Return the number of key and value heads."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_dim(self) -> int:
        """Return the width of one attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def rotary_size(self) -> int:
        """Return the number of channels of a head that rotary positions turn."""
        return int(self.head_dim * self.rotary_fraction)

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
    """Refuse an odd number of channels, or none, where the position embedding turns those of a head in pairs."""
    kind = POSITION_KINDS[model.position_embedding]
    turned = model.rotary_size
    if not kind.needs_even_head_dim or (turned > 0 and turned % 2 == 0):
        return
    name = model.position_embedding
    if model.rotary_fraction < 1:
        yield Fault(
            "megastable.model.rotary_fraction",
            model.rotary_fraction,
            f"must turn an even number of channels from 2; of a head of {model.head_dim} it is {turned}",
        )
        return
    yield Fault(
        "megastable.model.position_embedding",
        name,
        f"{name} needs an even head width; hidden_size / num_attention_heads is {model.head_dim}",
    )


def family_computes_the_same(model: ModelConfig) -> Iterator[Fault]:
    """Refuse what the class of the named family cannot express."""
    if model.family is None:
        return
    family = FAMILIES[model.family]
    for contradiction in family.contradictions(model):
        yield Fault(
            f"megastable.model.{contradiction.key}",
            contradiction.value,
            f'must {contradiction.demand}; "family": "{family.name}" is {family.class_name} of transformers',
        )


def capped_attention_is_plain(model: ModelConfig) -> Iterator[Fault]:
    """Refuse a backend that has no place for the cap beside a cap."""
    if model.attention_logit_cap is None or ATTENTION_KINDS[model.attention].allows_logit_cap:
        return
    legal = " or ".join(name for name, kind in ATTENTION_KINDS.items() if kind.allows_logit_cap)
    yield Fault("megastable.model.attention", model.attention, f"must be {legal} with attention_logit_cap")
