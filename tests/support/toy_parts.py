"""A toy kind of every part of the model: one record in core and one module in the model each, and nothing else.

They are as unlike the real kinds as can be, so that a number that is not read from the record would show. A process
that runs a file which names them calls ``register`` first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megastable.config import ModelConfig
from megastable.core.init_std import INIT_SCHEMES, MatrixSize
from megastable.core.model_parts import (
    ATTENTION_KINDS,
    FEED_FORWARD_KINDS,
    NORM_KINDS,
    POSITION_KINDS,
    AttentionKind,
    FeedForwardKind,
    NormKind,
    PositionKind,
)
from megastable.core.pieces import Shard, Span, share_of
from megastable.model.attention import ATTENTION_BACKENDS
from megastable.model.block import FEED_FORWARDS
from megastable.model.positions import POSITION_EMBEDDINGS, AttentionBias, PositionEmbedding
from megastable.model.residual_stream import NORMS
from megastable.model.tensor_parallel import ColumnParallelLinear, RowParallelLinear, TensorGroup

NAME = "toy"
PATHS = 3


class ToyFeedForward(nn.Module):
    """Three paths of an inner width: the first times the second plus the third."""

    def __init__(self, config: ModelConfig, tensor: TensorGroup) -> None:
        super().__init__()
        rows: tuple[Span, ...] = ()
        for path in range(PATHS):
            rows += share_of([(path * config.ffn_size, (path + 1) * config.ffn_size)], tensor.size, tensor.rank)
        self.input = ColumnParallelLinear(Shard((PATHS * config.ffn_size, config.hidden_size), 0, rows), tensor)
        self.output = RowParallelLinear(config.ffn_size, config.hidden_size, tensor)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, seq, hidden) to the same shape."""
        first, second, third = self.input(x).chunk(PATHS, dim=-1)
        return self.output(first * second + third)


class ToyNorm(nn.Module):
    """Divide by the mean magnitude, and scale."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Norm the last dimension."""
        return x / (x.abs().mean(-1, keepdim=True) + self.eps) * self.weight


class ToyPositions(PositionEmbedding):
    """A learned table as well as a penalty of each head for distance."""

    def __init__(self, config: ModelConfig, tensor: TensorGroup) -> None:
        super().__init__(config, tensor)
        self._size = (config.seq_length, config.hidden_size)
        slopes = 0.1 * torch.arange(1, config.num_attention_heads + 1)
        self.bias = AttentionBias(slopes.view(tensor.size, -1)[tensor.rank])

    def make_table(self) -> nn.Embedding:
        """Allocate one vector a position, (seq_length, hidden)."""
        return nn.Embedding(*self._size)


def toy_attention(q: Tensor, k: Tensor, v: Tensor, bias: AttentionBias, dropout: float) -> Tensor:
    """Attend by plain products, with every score halved."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = 0.5 * (q @ k.transpose(-1, -2)) + bias.get(q.shape[-2], q.device, q.dtype)
    return nn.functional.dropout(scores.softmax(dim=-1), dropout) @ v


def toy_std(size: MatrixSize, fixed_std: float | None) -> float:
    """Return half of 1 / sqrt(fan_in)."""
    return 0.5 * float(size.fan_in) ** -0.5


ENTRIES: list[tuple[dict[str, Any], Any]] = [
    (FEED_FORWARD_KINDS, FeedForwardKind(PATHS, kept_per_width=4, default_inner_size=lambda hidden: 5 * hidden)),
    (FEED_FORWARDS, ToyFeedForward),
    (NORM_KINDS, NormKind(has_bias=False, fused_on_cpu=False, fused_on_gpu=False)),
    (NORMS, ToyNorm),
    (POSITION_KINDS, PositionKind(has_table=True, bias_per_head=True)),
    (POSITION_EMBEDDINGS, ToyPositions),
    (ATTENTION_KINDS, AttentionKind(keeps_weights=True, allows_logit_cap=False)),
    (ATTENTION_BACKENDS, toy_attention),
    (INIT_SCHEMES, toy_std),
]
"""Registry, and the toy's entry in it."""

RUN_FILE_KEYS: dict[str, str] = {
    "megastable__model__activation": NAME,
    "megastable__model__norm": NAME,
    "megastable__model__position_embedding": NAME,
    "megastable__model__attention": NAME,
    "megastable__init__scheme": NAME,
}
"""Changes of ``tiny_run`` that choose every toy."""


def register() -> None:
    """Make the toys known to this process."""
    for registry, entry in ENTRIES:
        registry[NAME] = entry
