"""What the model knows of its tensor-parallel neighbours: one small object, and the layers that are split over it.

The object is handed in by the engine floor. With one process the same code runs on ``OneProcess``, without any
collective. Splits are Megatron's (Shoeybi et al., arXiv 1909.08053, section 3): column-parallel into a half block,
row-parallel out of it, one sum per half block and direction. Under sequence parallelism (Korthikanti et al., arXiv
2205.05198, section 4.2) what lies between two half blocks is a slice of the sequence, and the sum becomes a
reduce-scatter, with an all-gather where the next half block begins.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import FunctionCtx
from torch.utils.checkpoint import checkpoint

from megastable.model.products import differentiable_linear, linear, product, weight_gradient


class Work(Protocol):
    """A collective on its way."""

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
        """Elementwise maximum over the ranks, in place."""
        ...

    def start_gather(self, x: Tensor) -> tuple[Tensor, Work]:
        """Begin to collect every rank's contiguous ``x``: a result of shape (size, *x.shape)."""
        ...

    def start_reduce_scatter(self, x: Tensor) -> tuple[Tensor, Work]:
        """Begin to sum a contiguous ``x`` of shape (size, ...) over the ranks; each gets the entry of its rank."""
        ...

    def split_randomness(self) -> contextlib.AbstractContextManager[None]:
        """Draw from a stream of this rank's own, for what is split; outside, all ranks draw the same."""
        ...

    def recomputed(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """``function(x)``, of which only ``x`` is kept: the backward pass calls it again, with the same randomness."""
        ...


class _Done:
    def wait(self) -> None:
        """There was nothing to wait for."""


class OneProcess:
    """A tensor group of one: nothing is split and nothing is sent."""

    size = 1
    rank = 0
    sequence_parallel = False

    def start_all_reduce(self, x: Tensor) -> Work:
        """The sum over one rank."""
        return _Done()

    def all_reduce_max(self, x: Tensor) -> None:
        """The maximum over one rank."""

    def start_gather(self, x: Tensor) -> tuple[Tensor, Work]:
        """This rank's own."""
        return x.unsqueeze(0), _Done()

    def start_reduce_scatter(self, x: Tensor) -> tuple[Tensor, Work]:
        """This rank's own."""
        return x.squeeze(0), _Done()

    def split_randomness(self) -> contextlib.AbstractContextManager[None]:
        """One stream is enough."""
        return contextlib.nullcontext()

    def recomputed(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """torch's recomputation plays its own stream back."""
        result: Tensor = checkpoint(function, x, use_reentrant=False)
        return result


@dataclass(frozen=True)
class Shard:
    """Which part of a full weight a rank holds: ``indices`` along ``dim``."""

    full_shape: tuple[int, ...]
    dim: int
    indices: Tensor

    @classmethod
    def even(cls, full_shape: tuple[int, ...], dim: int, tensor: TensorGroup) -> Shard:
        """The rank's equal, contiguous share."""
        share = full_shape[dim] // tensor.size
        return cls(full_shape, dim, torch.arange(tensor.rank * share, (tensor.rank + 1) * share))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the part."""
        return (*self.full_shape[: self.dim], len(self.indices), *self.full_shape[self.dim + 1 :])

    def of(self, full: Tensor) -> Tensor:
        """The part of a ``full`` weight, or of anything that runs along its first dimensions, such as a bias."""
        return full.index_select(self.dim, self.indices)


class ColumnParallelLinear(nn.Module):
    """A linear layer whose output features are split; (batch, seq, in) to (batch, seq, the rank's share of out).

    Under sequence parallelism the input is the rank's slice of the sequence and the output is of the whole sequence.

    Args:
        shard: of the full weight (out, in), along dimension 0.
    """

    def __init__(self, shard: Shard, tensor: TensorGroup, bias: bool = True) -> None:
        super().__init__()
        self.shard, self.tensor = shard, tensor
        self.weight = nn.Parameter(torch.empty(shard.shape))
        self.bias = nn.Parameter(torch.zeros(shard.shape[0])) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """(batch, seq, in) to (batch, seq, share of out)."""
        return column_parallel_linear(x, self.weight, self.bias, self.tensor)


class RowParallelLinear(nn.Module):
    """A linear layer whose input features are split; (batch, seq, the rank's share of in) to (batch, seq, out).

    The bias is whole on every rank and added after the sum.
    """

    def __init__(self, in_features: int, out_features: int, tensor: TensorGroup) -> None:
        super().__init__()
        self.shard, self.tensor = Shard.even((out_features, in_features), 1, tensor), tensor
        self.weight = nn.Parameter(torch.empty(self.shard.shape))
        self.bias = nn.Parameter(torch.zeros(out_features))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, seq, share of in) to (batch, seq, out)."""
        return sum_over_ranks(differentiable_linear(x, self.weight), self.tensor) + self.bias


def column_parallel_linear(x: Tensor, weight: Tensor, bias: Tensor | None, tensor: TensorGroup) -> Tensor:
    """``ColumnParallelLinear`` on given weights."""
    if torch.compiler.is_compiling():  # only with one tensor rank, see config.tensor_rules
        return linear(x, weight, bias)
    result: Tensor = _ColumnLinear.apply(x, weight, bias, tensor)
    return result


def sum_over_ranks(partial: Tensor, tensor: TensorGroup) -> Tensor:
    """Sum what the ranks hold: whole on every rank, or each its slice of the sequence (dimension 1)."""
    if torch.compiler.is_compiling():
        return partial
    result: Tensor = _SumOverRanks.apply(partial, tensor)
    return result


def gather_features(share: Tensor, tensor: TensorGroup) -> Tensor:
    """Collect the last dimension from all ranks: (..., n) to (..., size * n), whole on every rank."""
    result: Tensor = _GatherFeatures.apply(share, tensor)
    return result


class _ColumnLinear(Function):
    """The sum of input gradients travels while the weight gradient is computed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, tensor: TensorGroup) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.tensor, ctx.has_bias = tensor, bias is not None
        return linear(_whole_sequence(x, tensor), weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        (gradient,) = gradients
        x, weight = ctx.saved_tensors
        tensor: TensorGroup = ctx.tensor
        if tensor.sequence_parallel:
            slices, gathering = tensor.start_gather(x.contiguous())
            x_gradient = product(gradient, weight)
            gathering.wait()
            x = _join_sequence(slices)
            x_gradient, summing = tensor.start_reduce_scatter(_split_sequence(x_gradient, tensor.size))
        else:
            x_gradient = product(gradient, weight)
            summing = tensor.start_all_reduce(x_gradient)
        of_weight = weight_gradient(gradient, x)
        of_bias = gradient.flatten(0, 1).sum(0) if ctx.has_bias else None
        summing.wait()
        return x_gradient, of_weight, of_bias, None


class _SumOverRanks(Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, tensor: TensorGroup) -> Tensor:
        ctx.tensor = tensor
        if tensor.sequence_parallel:
            result, work = tensor.start_reduce_scatter(_split_sequence(partial, tensor.size))
        else:
            ctx.mark_dirty(partial)
            result, work = partial, tensor.start_all_reduce(partial)
        work.wait()
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _whole_sequence(gradients[0], ctx.tensor), None


class _GatherFeatures(Function):
    @staticmethod
    def forward(ctx: FunctionCtx, share: Tensor, tensor: TensorGroup) -> Tensor:
        ctx.tensor = tensor  # type: ignore[attr-defined]
        shares, work = tensor.start_gather(share.contiguous())
        work.wait()
        return shares.movedim(0, -2).flatten(-2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        split = gradients[0].unflatten(-1, (ctx.tensor.size, -1)).movedim(-2, 0).contiguous()
        gradient, work = ctx.tensor.start_reduce_scatter(split)
        work.wait()
        return gradient, None


def _whole_sequence(x: Tensor, tensor: TensorGroup) -> Tensor:
    """(batch, slice, features) to (batch, seq, features) under sequence parallelism; the same tensor without it."""
    if not tensor.sequence_parallel:
        return x
    slices, work = tensor.start_gather(x.contiguous())
    work.wait()
    return _join_sequence(slices)


def _join_sequence(slices: Tensor) -> Tensor:
    """(size, batch, slice, features) to (batch, seq, features)."""
    return slices.movedim(0, 1).flatten(1, 2)


def _split_sequence(x: Tensor, size: int) -> Tensor:
    """The inverse of ``_join_sequence``, contiguous."""
    return x.unflatten(1, (size, -1)).movedim(1, 0).contiguous()
