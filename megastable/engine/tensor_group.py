"""The tensor ranks around this process: the collectives that the model is handed, and how its parameters are marked."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
import torch.distributed as dist
from deepspeed.runtime.activation_checkpointing.checkpointing import get_cuda_rng_tracker, non_reentrant_checkpoint
from torch import Tensor, nn

from megastable.core.layout import ParallelLayout
from megastable.model.attention import SelfAttention
from megastable.model.tensor_parallel import OneProcess, SplitLayer, TensorGroup, Work

SPLIT_STREAM = "tensor-parallel"
"""Name, in DeepSpeed's tracker, of the random stream that differs between tensor ranks."""


class ProcessTensorGroup:
    """Carries out the collectives of one tensor group.

    Layers are built with it before its process group exists, which is set with ``connect``.
    """

    def __init__(self, size: int, rank: int, sequence_parallel: bool) -> None:
        self.size = size
        self.rank = rank
        self.sequence_parallel = sequence_parallel
        self._group: dist.ProcessGroup | None = None

    def connect(self, group: dist.ProcessGroup) -> None:
        """Set the process group of the tensor ranks."""
        self._group = group

    def start_all_reduce(self, x: Tensor) -> Work:
        """Begin to sum ``x`` over the ranks, in place."""
        return _started(dist.all_reduce(x, group=self._group, async_op=True))

    def all_reduce_max(self, x: Tensor) -> None:
        """Replace ``x`` by its elementwise maximum over the ranks."""
        dist.all_reduce(x, op=dist.ReduceOp.MAX, group=self._group)

    def start_gather(self, x: Tensor) -> tuple[Tensor, Work]:
        """Begin to collect every rank's contiguous ``x``: a result of shape (size, *x.shape)."""
        result = x.new_empty(self.size, *x.shape)
        work = dist.all_gather_single(result.flatten(0, 1), x, group=self._group, async_op=True)
        return result, _started(work)

    def start_reduce_scatter(self, x: Tensor) -> tuple[Tensor, Work]:
        """Begin to sum a contiguous ``x`` of shape (size, ...) over the ranks; each gets the entry of its rank."""
        result = torch.empty_like(x[0])
        return result, _started(dist.reduce_scatter_single(result, x.flatten(0, 1), group=self._group, async_op=True))

    def split_randomness(self) -> contextlib.AbstractContextManager[None]:
        """Draw from this rank's own stream; DeepSpeed's recomputation knows it and plays it back."""
        return get_cuda_rng_tracker().fork(SPLIT_STREAM)

    def recomputed(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Compute ``function(x)`` and compute it again in the backward pass instead of keeping its activations.

        This is DeepSpeed's recomputation, as for whole blocks: torch's own would not play the split stream back.
        """
        result: Tensor = non_reentrant_checkpoint(function, x)
        return result


def make_tensor_group(layout: ParallelLayout, rank: int, sequence_parallel: bool) -> TensorGroup:
    """Make the tensor group of ``rank``; one of a single process needs no collectives."""
    if layout.tensor_parallel_size == 1:
        return OneProcess()
    # Tensor ranks are neighbours, see ``core.layout``.
    return ProcessTensorGroup(layout.tensor_parallel_size, rank % layout.tensor_parallel_size, sequence_parallel)


def mark_split_parameters(module: nn.Module) -> None:
    """Mark the parameters of which each tensor rank holds a part.

    A norm counts an unmarked parameter on tensor rank 0 alone, here and in DeepSpeed.
    """
    for child in module.modules():
        if isinstance(child, SplitLayer):
            for parameter in child.parameter_shards():
                parameter.model_parallel = True  # type: ignore[attr-defined]  # DeepSpeed's own mark


def whole_parameters(module: nn.Module) -> list[nn.Parameter]:
    """List the parameters of which every tensor rank has a copy: norms, positions, biases of row-parallel layers."""
    return [parameter for parameter in module.parameters() if not is_split(parameter)]


def is_split(parameter: nn.Parameter) -> bool:
    """Tell whether each tensor rank holds a part of the parameter."""
    return bool(getattr(parameter, "model_parallel", False))


def partial_parameters(module: nn.Module, size: int, sequence_parallel: bool) -> list[nn.Parameter]:
    """List the whole parameters whose gradient on a tensor rank is only a part of it, to be summed over the ranks.

    The norms of queries and keys see the rank's heads; under sequence parallelism every whole parameter sees its slice.
    """
    if size == 1:
        return []
    if sequence_parallel:
        return whole_parameters(module)
    attentions = [child for child in module.modules() if isinstance(child, SelfAttention)]
    norms = [norm for attention in attentions for norm in (attention.query_norm, attention.key_norm)]
    return [parameter for norm in norms if norm is not None for parameter in norm.parameters()]


def _started(work: dist.Work | None) -> Work:
    assert work is not None, "this process is not in its own tensor group"
    return work
