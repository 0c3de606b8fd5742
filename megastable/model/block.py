"""One transformer block: norm, attention, norm, feed-forward, each added to the residual stream."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megastable.config import ModelConfig
from megastable.core.flops import ATTENTION, FEED_FORWARD
from megastable.model.attention import SelfAttention
from megastable.model.positions import AttentionBias, RotaryTable
from megastable.model.residual_stream import ResidualDropout, make_norm
from megastable.model.tensor_parallel import ColumnParallelLinear, RowParallelLinear, Shard, TensorGroup


class GeluFeedForward(nn.Module):
    """Widen, GELU, narrow; (batch, seq, hidden) in and out."""

    def __init__(self, config: ModelConfig, tensor: TensorGroup) -> None:
        super().__init__()
        shard = Shard.even((config.ffn_size, config.hidden_size), 0, tensor)
        self.input = ColumnParallelLinear(shard, tensor)
        self.output = RowParallelLinear(config.ffn_size, config.hidden_size, tensor)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, seq, hidden) in and out."""
        return self.output(F.gelu(self.input(x), approximate="tanh"))


class SwigluFeedForward(nn.Module):
    """A SiLU gate times a linear path (Shazeer, arXiv 2002.05202, equation 6); (batch, seq, hidden) in and out.

    Gate and linear path are one projection, gate first: its input gradient is summed over the tensor ranks once.
    """

    def __init__(self, config: ModelConfig, tensor: TensorGroup) -> None:
        super().__init__()
        rows = torch.arange(2 * config.ffn_size).view(2, tensor.size, -1)[:, tensor.rank].flatten()
        self.input = ColumnParallelLinear(Shard((2 * config.ffn_size, config.hidden_size), 0, rows), tensor)
        self.output = RowParallelLinear(config.ffn_size, config.hidden_size, tensor)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, seq, hidden) in and out."""
        gate, linear = self.input(x).chunk(2, dim=-1)
        return self.output(F.silu(gate) * linear)


FEED_FORWARDS: dict[str, Callable[[ModelConfig, TensorGroup], nn.Module]] = {
    "gelu": GeluFeedForward,
    "swiglu": SwigluFeedForward,
}


class TransformerBlock(nn.Module):
    """Pre-norm block; (batch, seq, hidden) in and out, a slice of the sequence under sequence parallelism.

    Args:
        recomputed: halves, of ``core.recomputation``, of which only the input is kept for the backward pass.
    """

    def __init__(
        self,
        config: ModelConfig,
        bias: AttentionBias,
        rotary: RotaryTable | None,
        tensor: TensorGroup,
        recomputed: Collection[str] = (),
    ) -> None:
        super().__init__()
        self.tensor, self.recomputed = tensor, frozenset(recomputed)
        self.attention_norm = make_norm(config, config.hidden_size)
        self.attention = SelfAttention(config, bias, rotary, tensor)
        self.feed_forward_norm = make_norm(config, config.hidden_size)
        self.feed_forward = FEED_FORWARDS[config.activation](config, tensor)
        self.dropout = ResidualDropout(config.dropout, tensor)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, seq, hidden) in and out."""
        x = x + self._half(ATTENTION, self._attend, x)
        return x + self._half(FEED_FORWARD, self._feed_forward, x)

    def _half(self, name: str, half: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        if name in self.recomputed and torch.is_grad_enabled():
            return self.tensor.recomputed(half, x)
        return half(x)

    def _attend(self, x: Tensor) -> Tensor:
        return self.dropout(self.attention(self.attention_norm(x)))

    def _feed_forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.feed_forward(self.feed_forward_norm(x)))
