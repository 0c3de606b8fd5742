"""Causal self-attention in fp64, one head and one query at a time: slow, obvious, and shared with nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def plain_attention(q: Tensor, k: Tensor, v: Tensor, slopes: Sequence[float] | None = None) -> Tensor:
    """softmax(q k / sqrt(head_dim) - slope * distance) v over each token's own past, in fp64.

    Args:
        q: (batch, heads, seq, head_dim), not scaled.
        k: (batch, key-value heads, seq, head_dim), not scaled; ``v`` likewise. Neighbouring query heads share one.
        slopes: ALiBi's, one per query head.
    """
    q, k, v = q.double(), k.double(), v.double()
    _, num_heads, seq_length, head_dim = q.shape
    queries_per_key = num_heads // k.shape[1]
    heads = []
    for head in range(num_heads):
        keys, values = k[:, head // queries_per_key], v[:, head // queries_per_key]
        rows = []
        for position in range(seq_length):
            past = slice(0, position + 1)
            scores = torch.einsum("bd,bkd->bk", q[:, head, position], keys[:, past]) / head_dim**0.5
            if slopes is not None:
                scores = scores - slopes[head] * torch.arange(position, -1, -1, dtype=torch.float64)
            rows.append(torch.einsum("bk,bkd->bd", scores.softmax(-1), values[:, past]))
        heads.append(torch.stack(rows, dim=1))
    return torch.stack(heads, dim=1)


def plain_rotation(x: Tensor, base: float) -> Tensor:
    """Rotary positions in fp64: channels i and i + head_dim/2 are one complex number, turned by an angle.

    Args:
        x: (batch, heads, seq, head_dim).
        base: the angle at position p is p * base^(-2i / head_dim).
    """
    real, imaginary = x.double().chunk(2, dim=-1)
    seq_length, half = real.shape[-2:]
    turned = []
    for position in range(seq_length):
        angles = torch.tensor([position * base ** (-i / half) for i in range(half)], dtype=torch.float64)
        number = torch.complex(real[..., position, :], imaginary[..., position, :])
        number = number * torch.polar(torch.ones_like(angles), angles)
        turned.append(torch.cat((number.real, number.imag), dim=-1))
    return torch.stack(turned, dim=-2)
