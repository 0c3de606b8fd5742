"""The layers at both ends of the model: embedding, final norm, head."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megastable.config import ModelConfig
from megastable.model.attention import soft_cap
from megastable.model.residual_stream import ResidualDropout, make_norm
from megastable.model.tensor_parallel import (
    ColumnParallelLinear,
    Shard,
    TensorGroup,
    column_parallel_linear,
    sum_over_ranks,
)


class LogitCap(nn.Module):
    """Caps the logits of the vocabulary where configured. Monitors look at them here, before the cap."""

    def __init__(self, cap: float | None) -> None:
        super().__init__()
        self.cap = cap

    def forward(self, logits: Tensor) -> Tensor:
        """Logits of any shape, in and out."""
        return soft_cap(logits, self.cap)


class HeadInput(NamedTuple):
    """What a head hands to a loss in chunks, in place of logits: their makings.

    The weight is a view of the head's. DeepSpeed prepares for a backward pass when the first gradient reaches an output
    of the model, and has to do so before a weight has its gradient; through the view it does.
    """

    hidden: Tensor
    """(batch, seq or slice, hidden)"""
    weight: Tensor
    """(share of the padded vocabulary, hidden)"""
    logits_of: Callable[[Tensor, Tensor], Tensor]
    """Of a part of ``hidden`` and the weight: (batch, part of the whole sequence, share of the padded vocabulary)."""


class VocabularyEmbedding(nn.Module):
    """Token ids (batch, seq) to vectors (batch, seq, hidden); also the head where weights are tied.

    Each tensor rank holds its share of the vocabulary. Under sequence parallelism the output is the rank's slice.
    """

    def __init__(self, config: ModelConfig, tensor: TensorGroup) -> None:
        super().__init__()
        self.shard, self.tensor = Shard.even((config.padded_vocab_size, config.hidden_size), 0, tensor), tensor
        self.weight = nn.Parameter(torch.empty(self.shard.shape))
        self.cap = LogitCap(config.output_logit_cap)

    def forward(self, token_ids: Tensor) -> Tensor:
        """(batch, seq) int64 to (batch, seq or slice, hidden)."""
        row = token_ids - self.tensor.rank * len(self.weight)
        elsewhere = (row < 0) | (row >= len(self.weight))
        own = F.embedding(row.masked_fill(elsewhere, 0), self.weight)
        return sum_over_ranks(own.masked_fill(elsewhere.unsqueeze(-1), 0.0), self.tensor)


def tied_logits(embedding: VocabularyEmbedding, x: Tensor) -> Tensor:
    """(batch, seq or slice, hidden) to logits (batch, seq, share of the vocabulary) by the embedding's own weight."""
    return _logits(x, embedding.weight, embedding.tensor, embedding.cap)


def tied_head_input(embedding: VocabularyEmbedding, x: Tensor) -> HeadInput:
    """The makings of ``tied_logits``."""
    return _head_input(x, embedding.weight, embedding.tensor, embedding.cap)


def _logits(x: Tensor, weight: Tensor, tensor: TensorGroup, cap: LogitCap) -> Tensor:
    logits: Tensor = cap(column_parallel_linear(x, weight, None, tensor))
    return logits


def _head_input(x: Tensor, weight: Tensor, tensor: TensorGroup, cap: LogitCap) -> HeadInput:
    return HeadInput(x, weight.view_as(weight), lambda part, seen: _logits(part, seen, tensor, cap))


class EmbeddingFinish(nn.Module):
    """What follows the lookup: learned positions, the embedding norm (BLOOM's) and dropout, each where configured."""

    def __init__(self, config: ModelConfig, tensor: TensorGroup) -> None:
        super().__init__()
        learned = config.position_embedding == "learned"
        self.tensor = tensor
        self.positions = nn.Embedding(config.seq_length, config.hidden_size) if learned else None
        self.norm = make_norm(config, config.hidden_size) if config.embedding_norm else None
        self.dropout = ResidualDropout(config.dropout, tensor)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, seq or slice, hidden) in and out."""
        if self.positions is not None:
            first = self.tensor.rank * x.shape[1] if self.tensor.sequence_parallel else 0
            x = x + self.positions.weight[first : first + x.shape[1]]
        if self.norm is not None:
            x = self.norm(x)
        return self.dropout(x)


class FinalNorm(nn.Module):
    """The norm before the head; (batch, seq or slice, hidden) in and out."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = make_norm(config, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, seq or slice, hidden) in and out."""
        return self.norm(x)


class OutputHead(nn.Module):
    """An untied head: (batch, seq or slice, hidden) to logits (batch, seq, share of the padded vocabulary).

    Args:
        in_chunks: hand on the makings of the logits instead, for a loss in chunks.
    """

    def __init__(self, config: ModelConfig, tensor: TensorGroup, in_chunks: bool = False) -> None:
        super().__init__()
        self.in_chunks = in_chunks
        shard = Shard.even((config.padded_vocab_size, config.hidden_size), 0, tensor)
        self.linear = ColumnParallelLinear(shard, tensor, bias=False)
        self.cap = LogitCap(config.output_logit_cap)

    def forward(self, x: Tensor) -> Tensor | HeadInput:
        """(batch, seq or slice, hidden) to (batch, seq, share of the padded vocabulary), or to the makings of it."""
        make = _head_input if self.in_chunks else _logits
        return make(x, self.linear.weight, self.linear.tensor, self.cap)
