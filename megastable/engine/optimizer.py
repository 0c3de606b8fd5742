"""The optimizer that ZeRO shards: torch's own Adam, in its fused form.

DeepSpeed's FusedAdam is compiled at the first start (half a minute, in a shared cache folder); torch brings a fused
kernel for CPU and GPU with it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from megastable.config import RunConfig


def build_optimizer(module: nn.Module, run: RunConfig) -> torch.optim.Optimizer:
    """Adam or AdamW over two groups: matrices with weight decay; biases, norms and other vectors without."""
    params = run.optimizer.params
    decoupled = run.optimizer.type == "AdamW" or params.adam_w_mode
    optimizer_class = torch.optim.AdamW if decoupled else torch.optim.Adam
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trainable if p.dim() > 1], "weight_decay": params.weight_decay},
        {"params": [p for p in trainable if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return optimizer_class(groups, lr=params.lr, betas=params.betas, eps=params.eps, fused=params.fused)
