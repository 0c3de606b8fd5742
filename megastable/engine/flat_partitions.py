"""Where DeepSpeed's two ZeRO-1 optimizers keep this rank's fp32 master weights.

ZeRO lays the parameters of a group end to end in one flat tensor and cuts that into equal shares, one a replica. A cut
may fall into the middle of a parameter, and parameters with no element in a rank's share have no address there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from megastable.engine.tensor_group import is_split

Span = tuple[int, int]
"""Indices of the first element and of the one after the last."""


@dataclass(frozen=True)
class FlatPartition:
    """This rank's share of one parameter group.

    Attributes:
        master: the flat fp32 weights of the share, (elements,), padding at the end included.
        parameters: all parameters of the group, with an element in the share or not.
        tensor_rank: the tensor rank of this process.
    """

    master: Tensor
    parameters: list[Any]
    tensor_rank: int

    @cached_property
    def held(self) -> list[Any]:
        """Return the parameters with elements in this share; their ``_hp_mapping`` says where."""
        return [parameter for parameter in self.parameters if parameter._hp_mapping is not None]

    @cached_property
    def counted_parameters(self) -> list[Any]:
        """Return the held parameters that this rank's copy stands for in a sum over the model."""
        return [parameter for parameter in self.held if self._counts_here(parameter)]

    @cached_property
    def counted(self) -> list[Span]:
        """Return where ``counted_parameters`` lie in ``master``, neighbours joined."""
        return list(_joined(span_of(parameter) for parameter in self.counted_parameters))

    @cached_property
    def copies(self) -> list[Span]:
        """Return where the other held parameters lie, which another rank counts; neighbours joined."""
        return list(_joined(span_of(parameter) for parameter in self.held if not self._counts_here(parameter)))

    def _counts_here(self, parameter: Any) -> bool:
        # Of a tied weight, DeepSpeed marks every copy but that of the first stage.
        if getattr(parameter, "ds_pipe_replicated", False):
            return False
        return is_split(parameter) or self.tensor_rank == 0


def flat_partitions(optimizer: Any, tensor_rank: int) -> list[FlatPartition]:
    """List this rank's share of every parameter group."""
    if hasattr(optimizer, "single_partition_of_fp32_groups"):  # DeepSpeedZeroOptimizer
        masters = optimizer.single_partition_of_fp32_groups
        groups = optimizer.bit16_groups
    else:  # BF16_Optimizer
        masters = optimizer.fp32_groups_flat_partition
        groups = optimizer.bf16_groups
    return [FlatPartition(master, list(group), tensor_rank) for master, group in zip(masters, groups, strict=True)]


def span_of(parameter: Any) -> Span:
    """Say where the part of a held parameter lies in ``master``."""
    address = parameter._hp_mapping.hp_fragment_address
    return address.start, address.start + address.numel


def _joined(spans: Iterable[Span]) -> Iterator[Span]:
    """Join spans that touch: one norm over many neighbours is much faster than a norm for each."""
    first: int | None = None
    last = 0
    for start, stop in sorted(spans):
        if first is not None and start == last:
            last = stop
            continue
        if first is not None:
            yield first, last
        first = start
        last = stop
    if first is not None:
        yield first, last
