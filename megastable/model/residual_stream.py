"""What stands on the residual stream between the half blocks and at both ends of the model: norms and dropout."""

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
"""Name in a run file -> the norm of a width and an eps; ``core.model_parts.NORM_KINDS`` has the numbers of the same
names."""


def make_norm(config: ModelConfig, width: int) -> nn.Module:
    """Build the configured norm over a last dimension of ``width``."""
    return NORMS[config.norm](width, config.norm_eps)


class ResidualDropout(nn.Module):
    """Dropout of what lies between half blocks.

    Where that is whole on every tensor rank, all ranks draw the same mask, so that their copies stay equal. Under
    sequence parallelism each rank has a slice of its own, and draws a mask of its own.
    """

    def __init__(self, probability: float, tensor: TensorGroup) -> None:
        super().__init__()
        self.probability = probability
        self.tensor = tensor

    def forward(self, x: Tensor) -> Tensor:
        """Drop values of ``x`` (batch, seq or slice, hidden) in training."""
        if not self.training or self.probability == 0.0:
            return x
        if not self.tensor.sequence_parallel:
            return F.dropout(x, self.probability)
        with self.tensor.split_randomness():
            return F.dropout(x, self.probability)
