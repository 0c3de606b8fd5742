"""The layers at both ends of the model: embedding, final norm, head."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megastable.config import ModelConfig
from megastable.model.block import make_norm


class VocabularyEmbedding(nn.Module):
    """Token ids (batch, seq) to vectors (batch, seq, hidden); also the head where weights are tied."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.padded_vocab_size, config.hidden_size))

    def forward(self, token_ids: Tensor) -> Tensor:
        """(batch, seq) int64 to (batch, seq, hidden)."""
        return F.embedding(token_ids, self.weight)


def tied_logits(embedding: VocabularyEmbedding, x: Tensor) -> Tensor:
    """(batch, seq, hidden) to logits (batch, seq, padded vocabulary) by the embedding's own weight."""
    return F.linear(x, embedding.weight)


class EmbeddingFinish(nn.Module):
    """What follows the lookup: learned positions, the embedding norm (BLOOM's) and dropout, each where configured."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        learned = config.position_embedding == "learned"
        self.positions = nn.Embedding(config.seq_length, config.hidden_size) if learned else None
        self.norm = make_norm(config) if config.embedding_norm else None
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, seq, hidden) in and out."""
        if self.positions is not None:
            x = x + self.positions.weight[: x.shape[1]]
        if self.norm is not None:
            x = self.norm(x)
        return self.dropout(x)


class FinalNorm(nn.Module):
    """The norm before the head; (batch, seq, hidden) in and out."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = make_norm(config)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, seq, hidden) in and out."""
        return self.norm(x)


class OutputHead(nn.Module):
    """An untied head: (batch, seq, hidden) to logits (batch, seq, padded vocabulary)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.linear = nn.Linear(config.hidden_size, config.padded_vocab_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, seq, hidden) to (batch, seq, padded vocabulary)."""
        return self.linear(x)
