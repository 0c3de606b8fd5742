"""The kinds of norm."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from megastable.config import ModelConfig

NORMS: dict[str, Callable[[int, float], nn.Module]] = {
    "layernorm": lambda width, eps: nn.LayerNorm(width, eps=eps),
    "rmsnorm": lambda width, eps: nn.RMSNorm(width, eps=eps),
}


def make_norm(config: ModelConfig, width: int) -> nn.Module:
    """The configured norm over a last dimension of ``width``."""
    return NORMS[config.norm](width, config.norm_eps)
