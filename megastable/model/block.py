"""One transformer block: norm, attention, norm, feed-forward, each added to the residual stream."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

from megastable.config import ModelConfig
from megastable.model.attention import SelfAttention
from megastable.model.positions import AttentionBias, RotaryTable


class GeluFeedForward(nn.Module):
    """Widen, GELU, narrow; (batch, seq, hidden) in and out."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input = nn.Linear(config.hidden_size, config.ffn_size)
        self.output = nn.Linear(config.ffn_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, seq, hidden) in and out."""
        return self.output(F.gelu(self.input(x), approximate="tanh"))


class SwigluFeedForward(nn.Module):
    """A SiLU gate times a linear path (Shazeer, arXiv 2002.05202, equation 6); (batch, seq, hidden) in and out."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.hidden_size, config.ffn_size)
        self.input = nn.Linear(config.hidden_size, config.ffn_size)
        self.output = nn.Linear(config.ffn_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, seq, hidden) in and out."""
        return self.output(F.silu(self.gate(x)) * self.input(x))


FEED_FORWARDS: dict[str, Callable[[ModelConfig], nn.Module]] = {
    "gelu": GeluFeedForward,
    "swiglu": SwigluFeedForward,
}
NORMS: dict[str, Callable[[int, float], nn.Module]] = {
    "layernorm": lambda hidden_size, eps: nn.LayerNorm(hidden_size, eps=eps),
    "rmsnorm": lambda hidden_size, eps: nn.RMSNorm(hidden_size, eps=eps),
}


def make_norm(config: ModelConfig) -> nn.Module:
    """The configured norm over the hidden dimension."""
    return NORMS[config.norm](config.hidden_size, config.norm_eps)


class TransformerBlock(nn.Module):
    """Pre-norm block; (batch, seq, hidden) in and out."""

    def __init__(self, config: ModelConfig, bias: AttentionBias, rotary: RotaryTable | None) -> None:
        super().__init__()
        self.attention_norm = make_norm(config)
        self.attention = SelfAttention(config, bias, rotary)
        self.feed_forward_norm = make_norm(config)
        self.feed_forward = FEED_FORWARDS[config.activation](config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, seq, hidden) in and out."""
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))
