"""The optimizer that ZeRO shards, and what is set on the one that DeepSpeed wraps around it.

It is torch's own Adam in its fused form. DeepSpeed's FusedAdam is compiled at the first start, half a minute in a cache
folder that launches share, while torch brings a fused kernel for CPU and GPU with it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from megastable.config import RunConfig


def build_optimizer(module: nn.Module, run: RunConfig) -> torch.optim.Optimizer:
    """Build Adam or AdamW over two groups: matrices with weight decay; biases, norms and other vectors without."""
    params = run.optimizer.params
    # DeepSpeed's Adam decouples weight decay by default, too; ``adam_w_mode`` is its key for that.
    decoupled = run.optimizer.type == "AdamW" or params.adam_w_mode
    optimizer_class = torch.optim.AdamW if decoupled else torch.optim.Adam
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trainable if p.dim() > 1], "weight_decay": params.weight_decay},
        {"params": [p for p in trainable if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return optimizer_class(groups, lr=params.lr, betas=params.betas, eps=params.eps, fused=params.fused)


def skip_at_minimum_scale(optimizer: Any) -> None:
    """Let a step that overflows at the minimum loss scale be skipped like any other.

    DeepSpeed raises there, out of the middle of a step; megastable's monitors count such steps and stop the run with a
    diagnosis.
    """
    if getattr(optimizer, "loss_scaler", None) is not None:
        optimizer.loss_scaler.raise_error_at_min_scale = False
