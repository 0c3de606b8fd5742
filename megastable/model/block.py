"""One transformer block: norm, attention, norm, feed-forward, each half added to the residual stream.

The second half reads what the first has added, or, with a parallel residual, the input of the block as the first does
(Wang and Komatsuzaki's GPT-J; Black et al., arXiv 2204.06745, section 2.1).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megastable.config import ModelConfig
from megastable.core.flops import ATTENTION, FEED_FORWARD
from megastable.core.pieces import Shard, share_of
from megastable.model.attention import SelfAttention
from megastable.model.positions import PositionEmbedding
from megastable.model.residual_stream import ResidualDropout, make_norm
from megastable.model.tensor_parallel import ColumnParallelLinear, RowParallelLinear, TensorGroup


class GeluFeedForward(nn.Module):
    """Widens, applies GELU (Hendrycks and Gimpel, arXiv 1606.08415) and narrows again.

    Args:
        approximate: of torch's GELU: ``tanh``, or ``none`` for the function itself.
    """

    def __init__(self, config: ModelConfig, tensor: TensorGroup, approximate: str = "tanh") -> None:
        super().__init__()
        self.approximate = approximate
        shard = Shard.even((config.ffn_size, config.hidden_size), 0, tensor.size, tensor.rank)
        self.input = ColumnParallelLinear(shard, tensor, config.linear_biases)
        self.output = RowParallelLinear(config.ffn_size, config.hidden_size, tensor, config.linear_biases)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, seq or slice, hidden) to the same shape."""
        widened = self.input(x)  # (batch, seq, the rank's share of the inner width)
        return self.output(F.gelu(widened, approximate=self.approximate))


class SwigluFeedForward(nn.Module):
    """A SiLU gate times a linear path, then narrow (Shazeer, arXiv 2002.05202, equation 6).

    Gate and linear path are one projection, gate first: its input gradient is summed over the tensor ranks once.
    """

    def __init__(self, config: ModelConfig, tensor: TensorGroup) -> None:
        super().__init__()
        # An even cut of the fused rows would give some ranks the gate and others the path: each takes a share of both.
        gate = share_of([(0, config.ffn_size)], tensor.size, tensor.rank)
        linear = share_of([(config.ffn_size, 2 * config.ffn_size)], tensor.size, tensor.rank)
        shard = Shard((2 * config.ffn_size, config.hidden_size), 0, gate + linear)
        self.input = ColumnParallelLinear(shard, tensor, config.linear_biases)
        self.output = RowParallelLinear(config.ffn_size, config.hidden_size, tensor, config.linear_biases)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, seq or slice, hidden) to the same shape."""
        gate, linear = self.input(x).chunk(2, dim=-1)  # (batch, seq, the rank's share of the inner width) each
        return self.output(F.silu(gate) * linear)


FEED_FORWARDS: dict[str, Callable[[ModelConfig, TensorGroup], nn.Module]] = {
    "gelu": GeluFeedForward,
    "gelu_exact": functools.partial(GeluFeedForward, approximate="none"),
    "swiglu": SwigluFeedForward,
}
"""Name in a run file -> module; ``core.model_parts.FEED_FORWARD_KINDS`` has the numbers of the same names."""


class TransformerBlock(nn.Module):
    """A pre-norm block on the residual stream, or on a slice of its sequence under sequence parallelism.

    Args:
        recomputed: halves, of ``core.flops.HALVES``, of which only the input is kept for the backward pass.
    """

    def __init__(
        self,
        config: ModelConfig,
        positions: PositionEmbedding,
        tensor: TensorGroup,
        recomputed: Collection[str] = (),
    ) -> None:
        super().__init__()
        self.tensor = tensor
        self.recomputed = frozenset(recomputed)
        self.parallel_residual = config.parallel_residual
        self.documents = positions.documents
        self.attention_norm = make_norm(config, config.hidden_size)
        self.attention = SelfAttention(config, positions, tensor)
        self.feed_forward_norm = make_norm(config, config.hidden_size)
        self.feed_forward = FEED_FORWARDS[config.activation](config, tensor)
        self.dropout = ResidualDropout(config.dropout, tensor)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, seq or slice, hidden) to the same shape."""
        attended = x + self._half(ATTENTION, self._attend, x)
        read = x if self.parallel_residual else attended
        return attended + self._half(FEED_FORWARD, self._feed_forward, read)

    def _half(self, name: str, half: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        # An evaluation keeps nothing anyway, and would pay for the bookkeeping.
        if name in self.recomputed and torch.is_grad_enabled():
            return self.tensor.recomputed(self.documents.kept(half), x)
        return half(x)

    def _attend(self, x: Tensor) -> Tensor:
        return self.dropout(self.attention(self.attention_norm(x)))

    def _feed_forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.feed_forward(self.feed_forward_norm(x)))
