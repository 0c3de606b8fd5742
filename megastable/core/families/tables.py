"""What the tables of the families are made of: rows of linear layers, norms and fused projections."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megastable.core.families.family import MappedTensor, Part
from megastable.core.families.model_settings import ModelSettings
from megastable.core.pieces import Span


def same(name: str, shape: tuple[int, ...], theirs: str, transposed: bool = False) -> MappedTensor:
    """Map one tensor of ours to one of theirs, row by row."""
    return MappedTensor(name, shape, (Part(theirs, ((0, shape[0]),), transposed),))


def linear(
    ours: str, theirs: str, out_features: int, in_features: int, biases: bool = True, transposed: bool = False
) -> Iterator[MappedTensor]:
    """Yield weight and bias of a linear layer.

    Args:
        transposed: the class keeps the weight as (in, out).
    """
    yield same(f"{ours}.weight", (out_features, in_features), f"{theirs}.weight", transposed)
    if biases:
        yield same(f"{ours}.bias", (out_features,), f"{theirs}.bias")


def layer_norm(ours: str, theirs: str, width: int, has_bias: bool = True) -> Iterator[MappedTensor]:
    """Yield scale and bias of a norm."""
    yield same(f"{ours}.weight", (width,), f"{theirs}.weight")
    if has_bias:
        yield same(f"{ours}.bias", (width,), f"{theirs}.bias")


@dataclass(frozen=True)
class FusedRows:
    """Rows of our fused projection: for each key-value head its query heads, then its key, then its value."""

    kv_heads: int
    queries_per_kv_head: int
    head_dim: int

    @classmethod
    def of(cls, model: ModelSettings) -> FusedRows:
        """Lay the rows out for a model."""
        return cls(model.kv_heads, model.num_attention_heads // model.kv_heads, model.head_dim)

    @property
    def total(self) -> int:
        """Return the number of rows."""
        return self.kv_heads * (self.queries_per_kv_head + 2) * self.head_dim

    @property
    def queries(self) -> tuple[Span, ...]:
        """Return the rows of all queries, head by head."""
        return self._of_each_head(0, self.queries_per_kv_head)

    @property
    def keys(self) -> tuple[Span, ...]:
        """Return the rows of all keys."""
        return self._of_each_head(self.queries_per_kv_head, self.queries_per_kv_head + 1)

    @property
    def values(self) -> tuple[Span, ...]:
        """Return the rows of all values."""
        return self._of_each_head(self.queries_per_kv_head + 1, self.queries_per_kv_head + 2)

    def _of_each_head(self, first: int, stop: int) -> tuple[Span, ...]:
        starts = range(0, self.total, (self.queries_per_kv_head + 2) * self.head_dim)
        return tuple((start + first * self.head_dim, start + stop * self.head_dim) for start in starts)
