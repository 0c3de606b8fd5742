"""The layers at both ends of the model: embedding, final norm, head."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn import functional as F

from megastable.config import ModelConfig
from megastable.core.pieces import Shard
from megastable.model.attention import soft_cap
from megastable.model.positions import PositionEmbedding
from megastable.model.residual_stream import ResidualDropout, make_norm
from megastable.model.tensor_parallel import (
    ColumnParallelLinear,
    SplitLayer,
    TensorGroup,
    column_parallel_linear,
    sum_over_ranks,
)


class LogitCap(nn.Module):
    """Caps the logits of the vocabulary where configured.

    It is a module so that monitors can hook it: here they see the logits before the cap.
    """

    def __init__(self, cap: float | None) -> None:
        super().__init__()
        self.cap = cap

    def forward(self, logits: Tensor) -> Tensor:
        """Cap logits of any shape."""
        return soft_cap(logits, self.cap)


class HeadInput(NamedTuple):
    """What a head hands to a loss in chunks in place of logits, so that the loss can make them bit by bit.

    The weight is a view of the head's. DeepSpeed prepares for a backward pass when the first gradient reaches an output
    of the model, and has to do so before a weight has its gradient; through the view it does.
    """

    hidden: Tensor
    """(batch, seq or slice, hidden)"""
    weight: Tensor
    """(share of the padded vocabulary, hidden)"""
    logits_of: Callable[[Tensor, Tensor], Tensor]
    """A part of ``hidden`` and the weight -> logits (batch, part of the whole sequence, share of the vocabulary)."""


def vocabulary_shard(config: ModelConfig, tensor: TensorGroup) -> Shard:
    """Choose this rank's rows of a matrix with a row for each token.

    What pads the vocabulary is no part of the whole matrix: its rows are zero and, since no gradient reaches them, stay
    so.
    """
    full_shape = (config.vocab_size, config.hidden_size)
    return Shard.even(full_shape, 0, tensor.size, tensor.rank, padded_to=config.padded_vocab_size)


class VocabularyEmbedding(SplitLayer):
    """The table of a vector for each token of the vocabulary; also the head where weights are tied.

    Each tensor rank holds its share of the vocabulary. Under sequence parallelism the output is the rank's slice.
    """

    def __init__(self, config: ModelConfig, tensor: TensorGroup) -> None:
        super().__init__(vocabulary_shard(config, tensor), tensor)
        self.cap = LogitCap(config.output_logit_cap)

    def forward(self, token_ids: Tensor) -> Tensor:
        """Look up token ids (batch, seq) int64 as vectors (batch, seq or slice, hidden)."""
        row = token_ids - self.tensor.rank * len(self.weight)
        elsewhere = (row < 0) | (row >= len(self.weight))  # (batch, seq)
        # Tokens of other ranks look up some row and are zeroed, so that the sum over the ranks has each token once.
        own = F.embedding(row.masked_fill(elsewhere, 0), self.weight)  # (batch, seq, hidden)
        return sum_over_ranks(own.masked_fill(elsewhere.unsqueeze(-1), 0.0), self.tensor)


def tied_logits(embedding: VocabularyEmbedding, x: Tensor) -> Tensor:
    """Multiply (batch, seq or slice, hidden) by the embedding: logits (batch, seq, share of the padded vocabulary)."""
    return _logits(x, embedding.weight, embedding.tensor, embedding.cap)


def tied_head_input(embedding: VocabularyEmbedding, x: Tensor) -> HeadInput:
    """Hand on what ``tied_logits`` is made of, for a loss in chunks."""
    return _head_input(x, embedding.weight, embedding.tensor, embedding.cap)


def _logits(x: Tensor, weight: Tensor, tensor: TensorGroup, cap: LogitCap) -> Tensor:
    logits: Tensor = cap(column_parallel_linear(x, weight, None, tensor))
    return logits


def _head_input(x: Tensor, weight: Tensor, tensor: TensorGroup, cap: LogitCap) -> HeadInput:
    def logits_of(part: Tensor, viewed_weight: Tensor) -> Tensor:
        return _logits(part, viewed_weight, tensor, cap)

    return HeadInput(x, weight.view_as(weight), logits_of)


class EmbeddingFinish(nn.Module):
    """Applies what follows the lookup, each where configured: learned positions, BLOOM's embedding norm, dropout."""

    def __init__(self, config: ModelConfig, positions: PositionEmbedding, tensor: TensorGroup) -> None:
        super().__init__()
        self.tensor = tensor
        self.positions = positions.make_table()
        self.documents = positions.documents
        self.norm = make_norm(config, config.hidden_size) if config.embedding_norm else None
        self.dropout = ResidualDropout(config.dropout, tensor)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, seq or slice, hidden) to the same shape."""
        if self.positions is not None:
            length = x.shape[1]
            first = 0
            if self.tensor.sequence_parallel:  # a rank's slice begins where those of the ranks before it end
                first = self.tensor.rank * length
            documents = self.documents.current
            if documents is None:
                # (seq or slice, hidden), the same for every sample
                x = x + self.positions.weight[first : first + length]
            else:
                x = x + self.positions(documents.positions[:, first : first + length])  # (batch, seq or slice, hidden)
        if self.norm is not None:
            x = self.norm(x)
        return self.dropout(x)


class FinalNorm(nn.Module):
    """Norms the residual stream before the head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = make_norm(config, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """Norm (batch, seq or slice, hidden)."""
        return self.norm(x)


class OutputHead(nn.Module):
    """An untied head.

    Args:
        in_chunks: hand on what the logits are made of instead, for a loss in chunks.
    """

    def __init__(self, config: ModelConfig, tensor: TensorGroup, in_chunks: bool = False) -> None:
        super().__init__()
        self.in_chunks = in_chunks
        self.linear = ColumnParallelLinear(vocabulary_shard(config, tensor), tensor, bias=False)
        self.cap = LogitCap(config.output_logit_cap)

    def forward(self, x: Tensor) -> Tensor | HeadInput:
        """Map (batch, seq or slice, hidden) to logits (batch, seq, share of the vocabulary) or a ``HeadInput``."""
        if self.in_chunks:
            return _head_input(x, self.linear.weight, self.linear.tensor, self.cap)
        return _logits(x, self.linear.weight, self.linear.tensor, self.cap)
