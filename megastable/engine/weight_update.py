"""One optimizer step on the state of DeepSpeed's ZeRO-1 optimizers, with no more passes over it than it needs.

DeepSpeed's own ``step`` looks for bad values, copies gradients to fp64 for their norm, flattens them, widens them and
scales them, in a pass each, and asks the other ranks seven times; on one replica its reduction copies every gradient
into a bucket and reduces nothing. Here gradients are widened into place, one norm serves clipping and the search for
bad values, and the ranks are asked once. Checkpoints stay DeepSpeed's: all that is kept between steps is theirs.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor

from megastable.core.clipping import clip_coefficient
from megastable.engine.flat_partitions import FlatPartition

NORM_CHUNK = 1024
"""Elements that are summed in fp32, before fp64 takes over."""


class Gradients(Protocol):
    """Where an optimizer keeps the sums of a step's gradients."""

    def collect(self) -> list[Tensor]:
        """This rank's share of every parameter group, reduced over the replicas, flat in fp32 and still scaled."""
        ...

    def clear(self) -> None:
        """Make place for the next step's."""
        ...


class SeparateGradients:
    """``DeepSpeedZeroOptimizer``: each parameter has its own, in the format of the sums."""

    def __init__(self, optimizer: Any, reduced: bool) -> None:
        self._optimizer, self._reduced = optimizer, reduced

    def collect(self) -> list[Tensor]:
        """Widen each group into one flat tensor, and let go of what it was made of."""
        return [self._widened(number) for number in range(len(self._optimizer.bit16_groups))]

    def _widened(self, group: int) -> Tensor:
        optimizer = self._optimizer
        flat = torch.empty_like(optimizer.single_partition_of_fp32_groups[group])
        gradients: list[Tensor] = optimizer.averaged_gradients[group] if self._reduced else self._gradients_of(group)
        sizes = [gradient.numel() for gradient in gradients]
        *places, padding = flat.split([*sizes, flat.numel() - sum(sizes)])
        torch._foreach_copy_(places, [gradient.flatten() for gradient in gradients])
        padding.zero_()
        optimizer.averaged_gradients[group] = None
        for parameter in optimizer.bit16_groups[group]:
            parameter.grad = parameter.grad_accum = None
        return flat

    def _gradients_of(self, group: int) -> list[Tensor]:
        """A parameter that took no part has a gradient of zero."""
        parameters = self._optimizer.params_in_partition[group]
        found = [(parameter, self._optimizer.get_param_gradient_attribute(parameter)) for parameter in parameters]
        return [torch.zeros_like(parameter) if gradient is None else gradient for parameter, gradient in found]

    def clear(self) -> None:
        """``collect`` did."""


class FlatSums:
    """``BF16_Optimizer``: one flat fp32 tensor a group, to which every backward pass adds."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def collect(self) -> list[Tensor]:
        """They are where they are needed."""
        return list(self._optimizer.fp32_groups_gradient_flat_partition)

    def clear(self) -> None:
        """Start from zero."""
        self._optimizer.clear_hp_grads()
        self._optimizer.clear_lp_grads(set_to_none=True)


class WeightUpdate:
    """Takes the place of ``optimizer.step``, and of the reduction of gradients where there is but one replica."""

    def __init__(self, engine: PipelineEngine, optimizer: Any, partitions: list[FlatPartition]) -> None:
        self._optimizer, self._partitions = optimizer, partitions
        several_replicas = engine.dp_world_size > 1
        flat = hasattr(optimizer, "fp32_groups_gradients_flat")
        self._gradients: Gradients = FlatSums(optimizer) if flat else SeparateGradients(optimizer, several_replicas)
        optimizer.step = self.step
        if not several_replicas:
            engine._INSTRUCTION_MAP = {**engine._INSTRUCTION_MAP, schedule.ReduceGrads: lambda engine: None}

    @torch.no_grad()
    def step(self) -> None:
        """Clip and apply the gradients, or skip them on all ranks where one of them is not finite; collective."""
        optimizer, gradients = self._optimizer, self._gradients.collect()
        scale = float(getattr(optimizer, "loss_scale", 1.0))
        squares, all_finite = self._sum_of_squares(gradients)
        norm = math.sqrt(squares) / scale if all_finite else math.inf
        optimizer._global_grad_norm, optimizer.overflow = norm, not all_finite
        if all_finite:
            self._apply(gradients, clip_coefficient(norm, optimizer.clip_grad) / scale)
        self._gradients.clear()
        if hasattr(optimizer, "loss_scaler"):
            # Only now: these gradients were made with the scale as it was.
            optimizer._update_scale(not all_finite)

    def _sum_of_squares(self, gradients: list[Tensor]) -> tuple[float, bool]:
        """Over the model, each parameter once; and whether every copy of every parameter is finite."""
        counted, copies = [], []
        for partition, flat in zip(self._partitions, gradients, strict=True):
            counted += [_squares(flat[start:stop]) for start, stop in partition.counted]
            copies += [_squares(flat[start:stop]) for start, stop in partition.copies]
        zero = torch.zeros((), dtype=torch.float64, device=gradients[0].device)
        sums = torch.stack([torch.stack([zero, *counted]).sum(), torch.stack([zero, *copies]).sum()])
        dist.all_reduce(sums)
        squares, of_copies = sums.tolist()
        return squares, math.isfinite(squares) and math.isfinite(of_copies)

    def _apply(self, gradients: list[Tensor], factor: float) -> None:
        for partition, flat in zip(self._partitions, gradients, strict=True):
            partition.master.grad = flat if factor == 1.0 else flat.mul_(factor)
        self._optimizer.optimizer.step()
        for partition in self._partitions:
            partition.master.grad = None
        self._optimizer._lazy_init_hp_params_optimizer_state()
        self._optimizer.update_lp_params()


def _squares(flat: Tensor) -> Tensor:
    """Sum of squares in fp64, at the speed of fp32."""
    whole = flat.numel() // NORM_CHUNK * NORM_CHUNK
    norms = torch.linalg.vector_norm(flat[:whole].view(-1, NORM_CHUNK), dim=1)
    rest = torch.linalg.vector_norm(flat[whole:])
    return norms.double().square().sum() + rest.double().square()
