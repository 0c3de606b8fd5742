"""What the gradients need beyond DeepSpeed once a layer is shared by several tensor ranks."""

from __future__ import annotations

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
