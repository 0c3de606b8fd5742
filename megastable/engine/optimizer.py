"""The optimizer that ZeRO shards, and what is set on the optimizer that DeepSpeed wraps around it.

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


class ConfiguredOptimizer:
    """Remembers what the run file says of the optimizer, so that it can be put back after a load.

    Loading a checkpoint replaces the clip norm, the loss scaler with all its settings, and the hyperparameters of the
    parameter groups by those that were saved. Only the scaler's position (its scale and counters) belongs to the
    checkpoint.
    """

    SCALER_POSITION = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._clip_grad = optimizer.clip_grad
        self._scaler = getattr(optimizer, "loss_scaler", None)  # BF16_Optimizer has none
        self._groups = [
            {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
        ]

    def put_back(self) -> None:
        """Restore the configured settings, keeping the loaded scaler's position where both scale dynamically."""
        self._optimizer.clip_grad = self._clip_grad
        for group, configured in zip(self._optimizer.param_groups, self._groups, strict=True):
            group.update(configured)
        if self._scaler is None:
            return
        loaded = self._optimizer.loss_scaler
        # A static scale on either side is a setting, not a position.
        if self._scaler.dynamic and loaded.dynamic:
            for name in self.SCALER_POSITION:
                setattr(self._scaler, name, getattr(loaded, name))
        self._optimizer.loss_scaler = self._scaler
        self._optimizer.dynamic_loss_scale = self._scaler.dynamic
