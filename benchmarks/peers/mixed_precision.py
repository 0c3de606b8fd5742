"""The optimizer step of the candidates in plain torch, written by hand as a user of torch would."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megastable.config import RunConfig


class MasterWeightAdamW:
    """Fused AdamW on fp32 copies of the weights, after clipping by the global norm.

    With 16-bit weights the micro-batches' gradients are summed in 16 bits, as ZeRO stage 1 does in its default; with
    fp32 weights there are no copies.

    Args:
        parameters: of this rank.
        shared: the model is spread over all ranks, so the norm is, too.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], run: RunConfig, shared: bool) -> None:
        self._parameters: list[Tensor] = list(parameters)
        self._masters = [p if p.dtype == torch.float32 else p.detach().float() for p in self._parameters]
        self._clip_norm = run.clip_norm
        self._shared = shared
        params = run.optimizer.params
        # Matrices decay; biases and the scales of norms do not.
        groups = [
            {"params": [p for p in self._masters if p.dim() > 1], "weight_decay": params.weight_decay},
            {"params": [p for p in self._masters if p.dim() <= 1], "weight_decay": 0.0},
        ]
        self._adamw = torch.optim.AdamW(groups, lr=params.lr, betas=params.betas, eps=params.eps, fused=True)

    @torch.no_grad()
    def step(self) -> None:
        """Clip, update, write the 16-bit weights anew and forget the gradients."""
        # Copies where the weights have 16 bits; in fp32 the gradients themselves, which are then clipped in place.
        gradients = [p.grad.float() for p in self._parameters if p.grad is not None]
        square = nn.utils.get_total_norm(gradients) ** 2
        if self._shared:
            dist.all_reduce(square)
        torch._foreach_mul_(gradients, (self._clip_norm / (square.sqrt() + 1e-6)).clamp(max=1.0))
        for parameter, master, gradient in zip(self._parameters, self._masters, gradients, strict=True):
            parameter.grad = None
            master.grad = gradient
        self._adamw.step()
        if self._masters[0] is not self._parameters[0]:
            torch._foreach_copy_(self._parameters, self._masters)
        for master in self._masters:
            master.grad = None
