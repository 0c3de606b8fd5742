"""Causal self-attention with Q and K scaled before their product.

Each of Q and K is multiplied by head_dim^(-1/4), so the scores come out of the product already scaled and fp16 cannot
overflow there on values that a division afterwards would have saved.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megastable.config import ModelConfig
from megastable.model.positions import AttentionBias, RotaryTable

AttentionBackend = Callable[[Tensor, Tensor, Tensor, AttentionBias, float], Tensor]


def math_attention(q: Tensor, k: Tensor, v: Tensor, bias: AttentionBias, dropout: float) -> Tensor:
    """Two plain products with an fp32 softmax between them.

    Args:
        q: (batch, heads, seq, head_dim), already scaled, like ``k``.
        k: (batch, key-value heads, seq, head_dim), like ``v``.
        bias: added to the scores, not scaled.
        dropout: share of attention weights dropped.
    """
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = (q @ k.transpose(-1, -2)).float() + bias.get(q.shape[-2], q.device, torch.float32)
    weights = F.dropout(torch.softmax(scores, dim=-1).to(q.dtype), dropout)
    return weights @ v


def sdpa_attention(q: Tensor, k: Tensor, v: Tensor, bias: AttentionBias, dropout: float) -> Tensor:
    """torch's scaled_dot_product_attention with its own scale set to 1; arguments as ``math_attention``."""
    grouped = q.shape[1] != k.shape[1]
    if bias.causal_only:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True, scale=1.0, enable_gqa=grouped)
    mask = bias.get(q.shape[-2], q.device, q.dtype).unsqueeze(0)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, scale=1.0, enable_gqa=grouped)


def auto_attention(q: Tensor, k: Tensor, v: Tensor, bias: AttentionBias, dropout: float) -> Tensor:
    """The fastest that was measured for this device; arguments as ``math_attention``.

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


class SelfAttention(nn.Module):
    """Multi-head attention with grouped key-value heads; (batch, seq, hidden) in and out.

    The fused projection is laid out per key-value head: its query heads, then its key, then its value. A later split
    over tensor ranks then cuts between key-value heads.
    """

    def __init__(self, config: ModelConfig, bias: AttentionBias, rotary: RotaryTable | None) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.kv_heads = config.kv_heads
        self.queries_per_kv = config.num_attention_heads // config.kv_heads
        self.dropout = config.dropout
        self.backend = ATTENTION_BACKENDS[config.attention]
        self.bias = bias
        self.rotary = rotary
        fused_size = (config.num_attention_heads + 2 * config.kv_heads) * config.head_dim
        self.query_key_value = nn.Linear(config.hidden_size, fused_size)
        self.output = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """Attend; (batch, seq, hidden) in and out."""
        q, k, v = self._project(x)
        if self.rotary is not None:
            q, k = self.rotary.rotate(q), self.rotary.rotate(k)
        scale = self.head_dim**-0.25
        attended = self.backend(q * scale, k * scale, v, self.bias, self.dropout if self.training else 0.0)
        return self.output(attended.transpose(1, 2).flatten(2))

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        batch, seq, _ = x.shape
        fused = self.query_key_value(x).view(batch, seq, self.kv_heads, self.queries_per_kv + 2, self.head_dim)
        q = fused[..., : self.queries_per_kv, :].reshape(batch, seq, -1, self.head_dim)
        k, v = fused[..., -2, :], fused[..., -1, :]
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
