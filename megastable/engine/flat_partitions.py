"""Where DeepSpeed's two ZeRO-1 optimizers keep this rank's fp32 master weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from megastable.engine.tensor_group import is_split

Span = tuple[int, int]
"""From the first element to the one after the last."""


@dataclass(frozen=True)
class FlatPartition:
    """This rank's share of one parameter group.

    Attributes:
        master: the flat fp32 weights.
        parameters: of the whole group. One with a part in the share has ``_hp_mapping``: where that part lies in
            ``master``, and in the parameter.
        tensor_rank: of this process.
    """

    master: Tensor
    parameters: list[Any]
    tensor_rank: int

    def counts_here(self, parameter: Any) -> bool:
        """True on the one rank of each replica whose copy of a parameter stands for all."""
        if getattr(parameter, "ds_pipe_replicated", False):
            return False
        return is_split(parameter) or self.tensor_rank == 0

    @cached_property
    def counted(self) -> list[Span]:
        """Where parameters lie that count here, neighbours joined."""
        return list(_joined(_span(p) for p in self._held if self.counts_here(p)))

    @cached_property
    def copies(self) -> list[Span]:
        """Where parameters lie that count on another rank, neighbours joined."""
        return list(_joined(_span(p) for p in self._held if not self.counts_here(p)))

    @property
    def _held(self) -> list[Any]:
        return [parameter for parameter in self.parameters if parameter._hp_mapping is not None]


def flat_partitions(optimizer: Any, tensor_rank: int) -> list[FlatPartition]:
    """This rank's share of every parameter group."""
    if hasattr(optimizer, "single_partition_of_fp32_groups"):  # DeepSpeedZeroOptimizer
        pairs = zip(optimizer.single_partition_of_fp32_groups, optimizer.bit16_groups, strict=True)
    else:  # BF16_Optimizer
        pairs = zip(optimizer.fp32_groups_flat_partition, optimizer.bf16_groups, strict=True)
    return [FlatPartition(master, list(group), tensor_rank) for master, group in pairs]


def _span(parameter: Any) -> Span:
    address = parameter._hp_mapping.hp_fragment_address
    return address.start, address.start + address.numel


def _joined(spans: Iterable[Span]) -> Iterator[Span]:
    first: int | None = None
    last = 0
    for start, stop in sorted(spans):
        if first is not None and start == last:
            last = stop
            continue
        if first is not None:
            yield first, last
        first, last = start, stop
    if first is not None:
        yield first, last
