"""What a family reads of a run file's model section; core does not know the section itself."""

from __future__ import annotations

from typing import Protocol


class ModelSettings(Protocol):
    """The keys and sizes of the model section that a family reads; ``config.ModelConfig`` has them all."""

    @property
    def num_layers(self) -> int:
        """Return the number of blocks."""
        ...

    @property
    def hidden_size(self) -> int:
        """Return the width of the residual stream."""
        ...

    @property
    def num_attention_heads(self) -> int:
        """Return the number of query heads."""
        ...

    @property
    def kv_heads(self) -> int:
        """Return the number of key and value heads."""
        ...

    @property
    def head_dim(self) -> int:
        """Return the width of a head."""
        ...

    @property
    def ffn_size(self) -> int:
        """Return the inner width of a feed-forward layer."""
        ...

    @property
    def seq_length(self) -> int:
        """Return the tokens of a sample."""
        ...

    @property
    def vocab_size(self) -> int:
        """Return the number of token ids, without padding."""
        ...

    @property
    def position_embedding(self) -> str:
        """Return the kind of position embedding."""
        ...

    @property
    def rotary_base(self) -> float:
        """Return the base of the rotary wavelengths."""
        ...

    @property
    def rotary_fraction(self) -> float:
        """Return the share of a head's channels that is turned."""
        ...

    @property
    def norm(self) -> str:
        """Return the kind of norm."""
        ...

    @property
    def norm_eps(self) -> float:
        """Return what is added to the variance in every norm."""
        ...

    @property
    def activation(self) -> str:
        """Return the kind of feed-forward layer."""
        ...

    @property
    def linear_biases(self) -> bool:
        """Tell whether linear layers have biases."""
        ...

    @property
    def parallel_residual(self) -> bool:
        """Tell whether both halves of a block read its input."""
        ...

    @property
    def embedding_norm(self) -> bool:
        """Tell whether a norm follows the embedding."""
        ...

    @property
    def tie_embeddings(self) -> bool:
        """Tell whether the head is the embedding."""
        ...

    @property
    def dropout(self) -> float:
        """Return the share of values that is dropped."""
        ...
