"""The kinds of norm.

Dropout that draws the same masks on all tensor ranks where they hold the same, and other masks where they do not.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

from megastable.config import ModelConfig
from megastable.model.tensor_parallel import TensorGroup

NORMS: dict[str, Callable[[int, float], nn.Module]] = {
    "layernorm": lambda width, eps: nn.LayerNorm(width, eps=eps),
    "rmsnorm": lambda width, eps: nn.RMSNorm(width, eps=eps),
}


def make_norm(config: ModelConfig, width: int) -> nn.Module:
    """The configured norm over a last dimension of ``width``."""
    return NORMS[config.norm](width, config.norm_eps)


class ResidualDropout(nn.Module):
    """Dropout of what lies between half blocks: whole on every tensor rank, or a slice under sequence parallelism."""

    def __init__(self, probability: float, tensor: TensorGroup) -> None:
        super().__init__()
        self.probability, self.tensor = probability, tensor

    def forward(self, x: Tensor) -> Tensor:
        """(batch, seq or slice, hidden) in and out."""
        if not self.training or self.probability == 0.0:
            return x
        if not self.tensor.sequence_parallel:
            return F.dropout(x, self.probability)
        with self.tensor.split_randomness():
            return F.dropout(x, self.probability)
