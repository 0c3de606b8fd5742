"""The tensor-parallel neighbours of a rank, as the model sees them, and the layers that are split over them.

The model is handed a ``TensorGroup`` by the engine floor. With one process the same code runs on ``OneProcess``,
without any collective. Splits are Megatron's (Shoeybi et al., arXiv 1909.08053, section 3): column-parallel into a half
block, row-parallel out of it, one sum per half block and direction. Under sequence parallelism (Korthikanti et al.,
arXiv 2205.05198, section 4.2) what lies between two half blocks is a slice of the sequence, and the sum becomes a
reduce-scatter, with an all-gather where the next half block begins.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import FunctionCtx
from torch.utils.checkpoint import checkpoint

from megastable.core.pieces import Shard
from megastable.model.products import differentiable_linear, linear, product, weight_gradient


class Work(Protocol):
    """Stands for a collective that was started."""

    def wait(self) -> object:
        """Return once the result is there."""
        ...


class TensorGroup(Protocol):
    """The processes that share every layer of a stage, seen from one of them."""

    size: int
    rank: int
    sequence_parallel: bool

    def start_all_reduce(self, x: Tensor) -> Work:
        """Begin to sum ``x`` over the ranks, in place."""
        ...

    def all_reduce_max(self, x: Tensor) -> None:
        """Take the elementwise maximum over the ranks, in place."""
        ...

    def start_gather(self, x: Tensor) -> tuple[Tensor, Work]:
        """Begin to collect every rank's contiguous ``x``: a result of shape (size, *x.shape)."""
        ...

    def start_reduce_scatter(self, x: Tensor) -> tuple[Tensor, Work]:
        """Begin to sum a contiguous ``x`` of shape (size, ...) over the ranks; each gets the entry of its rank."""
        ...

    def split_randomness(self) -> contextlib.AbstractContextManager[None]:
        """Draw from a random stream of this rank alone, for what is split; outside, all ranks draw the same."""
        ...

    def recomputed(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Return ``function(x)`` and keep only ``x``: the backward pass calls it again, with the same randomness."""
        ...


class _Done:
    def wait(self) -> None:
        """Return at once: nothing was sent."""


class OneProcess:
    """A tensor group of one: nothing is split and nothing is sent."""

    size = 1
    rank = 0
    sequence_parallel = False

    def start_all_reduce(self, x: Tensor) -> Work:
        """Leave ``x``, which is the sum over one rank."""
        return _Done()

    def all_reduce_max(self, x: Tensor) -> None:
        """Leave ``x``, which is the maximum over one rank."""

    def start_gather(self, x: Tensor) -> tuple[Tensor, Work]:
        """Return this rank's own ``x`` as the only one."""
        return x.unsqueeze(0), _Done()

    def start_reduce_scatter(self, x: Tensor) -> tuple[Tensor, Work]:
        """Return the only entry, which is the sum of one."""
        return x.squeeze(0), _Done()

    def split_randomness(self) -> contextlib.AbstractContextManager[None]:
        """Draw from the one stream that there is."""
        return contextlib.nullcontext()

    def recomputed(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Recompute by torch's checkpoint, which plays the one random stream back."""
        result: Tensor = checkpoint(function, x, use_reentrant=False)
        return result


class SplitLayer(nn.Module):
    """A layer whose weight is split over the tensor ranks; the weight is drawn, marked and counted by its ``shard``.

    Args:
        shard: the part of the full weight that this rank holds.
    """

    def __init__(self, shard: Shard, tensor: TensorGroup) -> None:
        super().__init__()
        self.shard = shard
        self.tensor = tensor
        self.weight = nn.Parameter(torch.empty(shard.shape))

    def parameter_shards(self) -> dict[nn.Parameter, Shard]:
        """Say which part each rank holds of the parameters that are split; the others are whole on every rank."""
        return {self.weight: self.shard}


class ColumnParallelLinear(SplitLayer):
    """A linear layer whose output features are split over the ranks.

    Under sequence parallelism the input is the rank's slice of the sequence and the output is of the whole sequence.

    Args:
        shard: of the full weight (out, in), along dimension 0.
    """

    def __init__(self, shard: Shard, tensor: TensorGroup, bias: bool = True) -> None:
        super().__init__(shard, tensor)
        self.bias = nn.Parameter(torch.zeros(shard.shape[0])) if bias else None

    def parameter_shards(self) -> dict[nn.Parameter, Shard]:
        """Say which part is the rank's of the weight, and of the bias, which has an element for each output feature."""
        shards = super().parameter_shards()
        if self.bias is not None:
            shards[self.bias] = self.shard.of_rows
        return shards

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, seq or slice, in) to (batch, seq, share of out)."""
        return column_parallel_linear(x, self.weight, self.bias, self.tensor)


class RowParallelLinear(SplitLayer):
    """A linear layer whose input features are split over the ranks, whose outputs are then summed.

    The bias is whole on every rank and added after the sum, which would otherwise count it once a rank.
    """

    def __init__(self, in_features: int, out_features: int, tensor: TensorGroup, bias: bool = True) -> None:
        super().__init__(Shard.even((out_features, in_features), 1, tensor.size, tensor.rank), tensor)
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, seq, share of in) to (batch, seq or slice, out)."""
        summed = sum_over_ranks(differentiable_linear(x, self.weight), self.tensor)
        return summed if self.bias is None else summed + self.bias


def column_parallel_linear(x: Tensor, weight: Tensor, bias: Tensor | None, tensor: TensorGroup) -> Tensor:
    """Compute a ``ColumnParallelLinear`` with the given weights."""
    if torch.compiler.is_compiling():
        # Only with one tensor rank, whose input needs no sum: ``config.cross_rules.compiled_blocks_are_whole``.
        return linear(x, weight, bias)
    result: Tensor = _ColumnLinear.apply(x, weight, bias, tensor)
    return result


def sum_over_ranks(partial: Tensor, tensor: TensorGroup) -> Tensor:
    """Sum what the ranks hold (batch, seq, features): whole on every rank, or to each its slice of the sequence."""
    if torch.compiler.is_compiling():
        return partial
    result: Tensor = _SumOverRanks.apply(partial, tensor)
    return result


def gather_features(share: Tensor, tensor: TensorGroup) -> Tensor:
    """Collect the last dimension from all ranks: (..., n) to (..., size * n), whole on every rank."""
    result: Tensor = _GatherFeatures.apply(share, tensor)
    return result


class _ColumnLinear(Function):
    """A linear layer in whose backward pass the sum of input gradients travels while the weight gradient is computed.

    Under sequence parallelism only the rank's slice of the input is kept. The backward pass gathers the whole input
    again, while it computes the input gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, tensor: TensorGroup) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.tensor = tensor
        ctx.has_bias = bias is not None
        return linear(_whole_sequence(x, tensor), weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        (gradient,) = gradients
        x, weight = ctx.saved_tensors
        tensor: TensorGroup = ctx.tensor
        if tensor.sequence_parallel:
            slices, gathering = tensor.start_gather(x.contiguous())
            x_gradient = product(gradient, weight)  # (batch, seq, in), to be summed over the ranks' output features
            gathering.wait()
            x = _join_sequence(slices)  # (batch, seq, in)
            x_gradient, summing = tensor.start_reduce_scatter(_split_sequence(x_gradient, tensor.size))
        else:
            x_gradient = product(gradient, weight)
            summing = tensor.start_all_reduce(x_gradient)
        of_weight = weight_gradient(gradient, x)  # while the sum is on its way
        of_bias = gradient.flatten(0, 1).sum(0) if ctx.has_bias else None
        summing.wait()
        return x_gradient, of_weight, of_bias, None


class _SumOverRanks(Function):
    """A sum over the ranks, whose gradient every rank's part gets whole."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, tensor: TensorGroup) -> Tensor:
        ctx.tensor = tensor
        if tensor.sequence_parallel:
            result, work = tensor.start_reduce_scatter(_split_sequence(partial, tensor.size))
        else:
            ctx.mark_dirty(partial)  # the sum is written over it
            result = partial
            work = tensor.start_all_reduce(partial)
        work.wait()
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _whole_sequence(gradients[0], ctx.tensor), None


class _GatherFeatures(Function):
    """A gather of features, whose gradients are summed over the ranks that all used them, and shared out again."""

    @staticmethod
    def forward(ctx: FunctionCtx, share: Tensor, tensor: TensorGroup) -> Tensor:
        ctx.tensor = tensor  # type: ignore[attr-defined]
        shares, work = tensor.start_gather(share.contiguous())
        work.wait()
        return shares.movedim(0, -2).flatten(-2)  # (size, ..., n) to (..., size * n)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        split = gradients[0].unflatten(-1, (ctx.tensor.size, -1)).movedim(-2, 0).contiguous()  # (size, ..., n)
        gradient, work = ctx.tensor.start_reduce_scatter(split)
        work.wait()
        return gradient, None


def _whole_sequence(x: Tensor, tensor: TensorGroup) -> Tensor:
    """Gather (batch, slice, features) to (batch, seq, features) under sequence parallelism; else return ``x``."""
    if not tensor.sequence_parallel:
        return x
    slices, work = tensor.start_gather(x.contiguous())
    work.wait()
    return _join_sequence(slices)


def _join_sequence(slices: Tensor) -> Tensor:
    """Join (size, batch, slice, features) to (batch, seq, features)."""
    return slices.movedim(0, 1).flatten(1, 2)


def _split_sequence(x: Tensor, size: int) -> Tensor:
    """Split (batch, seq, features) to a contiguous (size, batch, slice, features)."""
    return x.unflatten(1, (size, -1)).movedim(1, 0).contiguous()
