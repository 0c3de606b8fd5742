"""The tensor ranks of this process: the collectives that the model is handed, and how its parameters are marked."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
import torch.distributed as dist
from deepspeed.runtime.activation_checkpointing.checkpointing import get_cuda_rng_tracker, non_reentrant_checkpoint
from torch import Tensor, nn

from megastable.core.layout import ParallelLayout
from megastable.model.attention import SelfAttention
from megastable.model.ends import VocabularyEmbedding
from megastable.model.tensor_parallel import ColumnParallelLinear, OneProcess, RowParallelLinear, TensorGroup, Work

SPLIT_STREAM = "tensor-parallel"


class ProcessTensorGroup:
    """The collectives of one tensor group. Layers are built before the group exists; it is set with ``connect``."""

    def __init__(self, size: int, rank: int, sequence_parallel: bool) -> None:
        self.size, self.rank, self.sequence_parallel = size, rank, sequence_parallel
        self._group: dist.ProcessGroup | None = None

    def connect(self, group: dist.ProcessGroup) -> None:
        """Say which processes they are."""
        self._group = group

    def start_all_reduce(self, x: Tensor) -> Work:
        """Begin to sum ``x`` over the ranks, in place."""
        return _started(dist.all_reduce(x, group=self._group, async_op=True))

    def all_reduce_max(self, x: Tensor) -> None:
        """Elementwise maximum over the ranks, in place."""
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
        """DeepSpeed's recomputation, as of whole blocks: it plays the split stream back, too."""
        result: Tensor = non_reentrant_checkpoint(function, x)
        return result


def make_tensor_group(layout: ParallelLayout, rank: int, sequence_parallel: bool) -> TensorGroup:
    """The tensor group of ``rank``; no collective where it has one process."""
    if layout.tensor_parallel_size == 1:
        return OneProcess()
    return ProcessTensorGroup(layout.tensor_parallel_size, rank % layout.tensor_parallel_size, sequence_parallel)


def mark_split_parameters(module: nn.Module) -> None:
    """Mark what each tensor rank holds a part of, which is how DeepSpeed counts a norm right.

    Without the mark only tensor rank 0's part would count.
    """
    for child in module.modules():
        if isinstance(child, ColumnParallelLinear | RowParallelLinear | VocabularyEmbedding):
            _mark(child.weight)
        if isinstance(child, ColumnParallelLinear) and child.bias is not None:
            _mark(child.bias)


def _mark(parameter: nn.Parameter) -> None:
    parameter.model_parallel = True  # type: ignore[attr-defined]  # DeepSpeed's own mark


def whole_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The parameters of which every tensor rank has a copy: norms, positions, the biases of row-parallel layers."""
    return [parameter for parameter in module.parameters() if not is_split(parameter)]


def is_split(parameter: nn.Parameter) -> bool:
    """True where each tensor rank holds a part of the parameter."""
    return bool(getattr(parameter, "model_parallel", False))


def partial_parameters(module: nn.Module, sequence_parallel: bool) -> list[nn.Parameter]:
    """The whole parameters whose gradient on a tensor rank is only a part of it.

    The norms of queries and keys see the rank's heads; under sequence parallelism every whole parameter sees its slice.
    """
    if sequence_parallel:
        return whole_parameters(module)
    attentions = [child for child in module.modules() if isinstance(child, SelfAttention)]
    norms = [norm for attention in attentions for norm in (attention.query_norm, attention.key_norm)]
    return [parameter for norm in norms if norm is not None for parameter in norm.parameters()]


def _started(work: dist.Work | None) -> Work:
    assert work is not None, "this process is not in its own tensor group"
    return work
