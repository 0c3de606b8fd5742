"""What the gradients need beyond DeepSpeed once a layer is shared by several tensor ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import nn

from megastable.engine.upstream_fixes import accumulated_gradient


def sum_partial_gradients(engine: PipelineEngine, parameters: list[nn.Parameter]) -> None:
    """Sum the gradients of ``parameters`` over the tensor ranks, once a step.

    Each rank saw only its slice of the sequence or its heads; without the sum their copies drift apart in silence. They
    travel together, since they are many and small.
    """
    if not parameters:
        return
    reduce_tied_grads = engine._INSTRUCTION_MAP[schedule.ReduceTiedGrads]
    group = engine.grid.get_slice_parallel_group()

    def exec_reduce_tied_grads(self: PipelineEngine) -> None:
        gradients = [accumulated_gradient(parameter) for parameter in parameters]
        present = [gradient for gradient in gradients if gradient is not None]
        together = torch.cat([gradient.flatten() for gradient in present])
        dist.all_reduce(together, group=group)
        for gradient, summed in zip(present, together.split([g.numel() for g in present]), strict=True):
            gradient.copy_(summed.view_as(gradient))
        reduce_tied_grads(self)

    engine._INSTRUCTION_MAP = {**engine._INSTRUCTION_MAP, schedule.ReduceTiedGrads: exec_reduce_tied_grads}


def check_gradients_of_every_rank(optimizer: Any) -> None:
    """Let one bad value on any tensor rank skip the step on all ranks.

    A norm counts whole parameters on tensor rank 0 alone. In fp32, and in bf16 with fp32 sums, DeepSpeed looks at
    nothing but the norm, so a bad value in another rank's copy would be applied there.
    """
    if hasattr(optimizer, "check_grad_overflow"):
        optimizer.check_grad_overflow = True
        return
    step = optimizer.step

    def step_if_finite(*args: Any, **kwargs: Any) -> None:
        norms = [torch.linalg.vector_norm(flat, ord=torch.inf) for flat in optimizer.fp32_groups_gradients_flat]
        bad = (~torch.isfinite(torch.stack(norms))).any().float()
        dist.all_reduce(bad, op=dist.ReduceOp.MAX)
        if not bad:
            step(*args, **kwargs)
            return
        optimizer.overflow = True
        optimizer._global_grad_norm = float("inf")
        optimizer.clear_hp_grads()
        optimizer.clear_lp_grads()

    optimizer.step = step_if_finite
