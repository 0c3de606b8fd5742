"""Where a token stands: rotary tables and the attention bias (causal mask, ALiBi). Learned positions are a layer.

Both objects are built once per process and shared by all blocks. They are no buffers of a module: a model that is
cast to 16 bits would round its buffers, and rotations are not to be rounded. (The fused attention kernel takes the bias
in the format of its inputs: bf16 rounds an ALiBi penalty to 8 bits, which falls where it is large.)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megastable.model.tensor_parallel import TensorGroup


class RotaryTable:
    """Cosines and sines of rotary positions (Su et al., arXiv 2104.09864, equation 34), half-split as in GPT-NeoX."""

    def __init__(self, head_dim: int, base: float) -> None:
        self._inverse_frequencies = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        self._tables: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}

    def rotate(self, x: Tensor) -> Tensor:
        """Rotate ``x`` (batch, heads, seq, head_dim) by its position along seq; computed in fp32, dtype kept."""
        cos, sin = self._table(x.shape[-2], x.device)
        first, second = x.float().chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)

    def _table(self, seq_length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        key = (seq_length, device)
        if key not in self._tables:
            angles = torch.outer(torch.arange(seq_length, dtype=torch.float64), self._inverse_frequencies)
            self._tables[key] = (angles.cos().float().to(device), angles.sin().float().to(device))
        return self._tables[key]


class AttentionBias:
    """What is added to the attention scores, unscaled: minus infinity above the diagonal, and ALiBi's penalty.

    Args:
        num_heads: query heads of the whole layer, for ALiBi's slopes; None for the causal mask alone.
    """

    def __init__(self, num_heads: int | None, tensor: TensorGroup) -> None:
        self._slopes = None
        if num_heads is not None:
            self._slopes = alibi_slopes(num_heads).view(tensor.size, -1)[tensor.rank]
        self._biases: dict[tuple[int, torch.device, torch.dtype], Tensor] = {}

    @property
    def causal_only(self) -> bool:
        """True where a kernel's own causal mask does the same."""
        return self._slopes is None

    def get(self, seq_length: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """The bias, (the rank's heads or 1, seq, seq), of ``dtype``."""
        key = (seq_length, device, dtype)
        if key not in self._biases:
            future = torch.ones(seq_length, seq_length, dtype=torch.bool).triu(1)
            bias = torch.zeros(1, seq_length, seq_length)
            if self._slopes is not None:
                position = torch.arange(seq_length, dtype=torch.float32)
                bias = self._slopes[:, None, None] * (position[None, None, :] - position[None, :, None])
            self._biases[key] = bias.masked_fill(future, -math.inf).to(device=device, dtype=dtype)
        return self._biases[key]


def alibi_slopes(num_heads: int) -> Tensor:
    """One slope per head (Press et al., arXiv 2108.12409, section 3; their code's rule off powers of two).

    For 2^n heads a geometric sequence from 2^(-8/num_heads); other counts take the slopes of the power of two below
    and fill up with every other slope of the power above. Shape (num_heads,).
    """
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2.0 ** (-8.0 * (head + 1) / power) for head in range(power)]
    slopes += [2.0 ** (-4.0 * (2 * head + 1) / power) for head in range(num_heads - power)]
    return torch.tensor(slopes)
