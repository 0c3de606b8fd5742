"""Causal self-attention with Q and K scaled before their product.

Each of Q and K is multiplied by head_dim^(-1/4), so the scores come out of the product already scaled and fp16 cannot
overflow there on values that a division afterwards would have saved.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megastable.config import ModelConfig
from megastable.core.pieces import Shard, share_of
from megastable.model.positions import AttentionBias, DocumentBias, PositionEmbedding
from megastable.model.residual_stream import make_norm
from megastable.model.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    TensorGroup,
    gather_features,
)

Bias = AttentionBias | DocumentBias
AttentionBackend = Callable[[Tensor, Tensor, Tensor, Bias, float], Tensor]
"""A function of q, k, v, bias and dropout as ``math_attention`` has them, to (batch, heads, seq, head_dim)."""


def math_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Bias, dropout: float, logit_cap: float | None = None
) -> Tensor:
    """Attend by two plain products with an fp32 softmax between them.

    Args:
        q: (batch, heads, seq, head_dim), already scaled, like ``k``.
        k: (batch, key-value heads, seq, head_dim), like ``v``.
        bias: added to the scores, not scaled.
        dropout: share of attention weights dropped.
        logit_cap: the scaled product x becomes cap * tanh(x / cap), before the bias.
    """
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k = k.repeat_interleave(groups, dim=1)  # (batch, heads, seq, head_dim)
        v = v.repeat_interleave(groups, dim=1)
    logits = soft_cap((q @ k.transpose(-1, -2)).float(), logit_cap)  # (batch, heads, query, key)
    scores = logits + bias.get(q.shape[-2], q.device, torch.float32)
    weights = F.dropout(torch.softmax(scores, dim=-1).to(q.dtype), dropout)
    return weights @ v  # (batch, heads, query, head_dim)


def sdpa_attention(q: Tensor, k: Tensor, v: Tensor, bias: Bias, dropout: float) -> Tensor:
    """Attend by torch's scaled_dot_product_attention, its own scale set to 1; arguments as ``math_attention``."""
    grouped = q.shape[1] != k.shape[1]
    if bias.causal_only:
        # The kernel's own mask lets it skip the blocks above the diagonal, which a mask of numbers does not.
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True, scale=1.0, enable_gqa=grouped)
    mask = bias.get(q.shape[-2], q.device, q.dtype)
    mask = mask.view(-1, *mask.shape[-3:])  # (batch or 1, heads or 1, query, key)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, scale=1.0, enable_gqa=grouped)


def auto_attention(q: Tensor, k: Tensor, v: Tensor, bias: Bias, dropout: float) -> Tensor:
    """Attend by the fastest way that was measured for this device; arguments as ``math_attention``.

    The fused kernel was nowhere slower than the plain product. Most CPUs only emulate 16-bit products, so there it runs
    in fp32 between two casts, several times faster (benchmarks/LOG.md).
    """
    if q.device.type == "cpu" and q.dtype != torch.float32:
        return sdpa_attention(q.float(), k.float(), v.float(), bias, dropout).to(q.dtype)
    return sdpa_attention(q, k, v, bias, dropout)


ATTENTION_BACKENDS: dict[str, AttentionBackend] = {
    "auto": auto_attention,
    "math": math_attention,
    "sdpa": sdpa_attention,
}
"""Name in a run file -> backend; ``core.model_parts.ATTENTION_KINDS`` has the numbers of the same names."""


def soft_cap(x: Tensor, cap: float | None) -> Tensor:
    """Compute cap * tanh(x / cap), which keeps x within the cap and leaves small values alone; None for no cap.

    Gemma 2 caps its logits so (arXiv 2408.00118, section 2).
    """
    if cap is None:
        return x
    return cap * torch.tanh(x / cap)


class QueryKeyScale(nn.Module):
    """Multiplies queries and keys by head_dim^(-1/4) each.

    It is a module so that monitors can hook it: here they see what is about to be multiplied.
    """

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.factor = head_dim**-0.25

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Scale both, (batch, heads, seq, head_dim) each."""
        return q * self.factor, k * self.factor


class SelfAttention(nn.Module):
    """Multi-head attention with grouped key-value heads, its heads split over the tensor ranks.

    The fused projection is laid out per key-value head: its query heads, then its key, then its value. Where there are
    fewer key-value heads than ranks, each rank projects its share of their features, and all of them are gathered, so
    that several ranks attend to the same key-value head.
    """

    def __init__(self, config: ModelConfig, positions: PositionEmbedding, tensor: TensorGroup) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.heads = config.num_attention_heads // tensor.size
        self.kv_heads = max(1, config.kv_heads // tensor.size)
        self.total_kv_heads = config.kv_heads
        self.dropout = config.dropout
        self.backend = ATTENTION_BACKENDS[config.attention]
        if config.attention_logit_cap is not None:
            # ``core.model_parts.CAPPED_ATTENTION``: no other backend can put the cap before the softmax.
            self.backend = functools.partial(math_attention, logit_cap=config.attention_logit_cap)
        self.positions = positions
        self.tensor = tensor
        self.query_key_value = ColumnParallelLinear(
            fused_projection_shard(config, tensor), tensor, config.linear_biases
        )
        self.output = RowParallelLinear(config.hidden_size, config.hidden_size, tensor, config.linear_biases)
        self.query_norm = make_norm(config, config.head_dim) if config.qk_norm else None
        self.key_norm = make_norm(config, config.head_dim) if config.qk_norm else None
        self.scale = QueryKeyScale(config.head_dim)

    def forward(self, x: Tensor) -> Tensor:
        """Attend; (batch, seq or slice, hidden) in and out."""
        q, k, v = self._project(x)
        if self.query_norm is not None and self.key_norm is not None:
            q = self.query_norm(q)
            k = self.key_norm(k)
        q = self.positions.rotate(q)
        k = self.positions.rotate(k)
        q, k = self.scale(q, k)
        attended = self._attend(q, k, v)  # (batch, heads, seq, head_dim)
        return self.output(attended.transpose(1, 2).flatten(2))  # from (batch, seq, heads * head_dim)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        bias = self.positions.attention_bias()
        if not self.training or self.dropout == 0.0:
            return self.backend(q, k, v, bias, 0.0)
        # Each rank has heads of its own, whose masks are not to be those of another rank's.
        with self.tensor.split_randomness():
            return self.backend(q, k, v, bias, self.dropout)

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project (batch, seq or slice, hidden) to q, k and v of this rank's heads, (batch, heads, seq, head_dim)."""
        fused = self.query_key_value(x)  # (batch, seq, the rank's rows of the fused projection)
        batch, seq, _ = fused.shape
        if self.total_kv_heads >= self.tensor.size:
            # (batch, seq, key-value heads, their query heads + key + value, head_dim)
            grouped = fused.view(batch, seq, self.kv_heads, -1, self.head_dim)
            q = grouped[..., :-2, :].reshape(batch, seq, -1, self.head_dim)
            k, v = grouped[..., -2:, :].unbind(-2)  # (batch, seq, key-value heads, head_dim) each
        else:
            q, share = fused.tensor_split([self.heads * self.head_dim], dim=-1)
            q = q.unflatten(-1, (self.heads, self.head_dim))
            # (batch, seq, all key-value heads, key + value, head_dim)
            every = gather_features(share, self.tensor).view(batch, seq, self.total_kv_heads, 2, self.head_dim)
            own = self.tensor.rank * self.total_kv_heads // self.tensor.size
            k, v = every[:, :, own : own + 1].unbind(-2)  # (batch, seq, 1, head_dim) each
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def fused_projection_shard(config: ModelConfig, tensor: TensorGroup) -> Shard:
    """Choose this rank's rows of the fused projection of queries, keys and values."""
    queries_per_kv_head = config.num_attention_heads // config.kv_heads
    rows_per_kv_head = (queries_per_kv_head + 2) * config.head_dim  # its queries, its key and its value
    full_shape = (config.kv_heads * rows_per_kv_head, config.hidden_size)
    if config.kv_heads >= tensor.size:
        return Shard.even(full_shape, 0, tensor.size, tensor.rank)
    # A rank takes the query heads of its share, and of all keys and values as many rows as every other rank.
    first_rows = range(0, full_shape[0], rows_per_kv_head)
    query_rows = queries_per_kv_head * config.head_dim
    queries = share_of([(row, row + query_rows) for row in first_rows], tensor.size, tensor.rank)
    keys_and_values = [(row + query_rows, row + rows_per_kv_head) for row in first_rows]
    return Shard(full_shape, 0, queries + share_of(keys_and_values, tensor.size, tensor.rank))
