"""Where DeepSpeed's two ZeRO-1 optimizers keep this rank's fp32 master weights, and how they lie in the whole model.

ZeRO lays the parameters of a group end to end in one flat tensor and cuts that into equal shares, one a replica. A cut
may fall into the middle of a parameter, and parameters with no element in a rank's share have no address there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from megastable.core.pieces import Piece, Shard, Span
from megastable.engine.pipeline_module import GptPipeline
from megastable.engine.tensor_group import is_split
from megastable.model.pieces import parameter_shards


@dataclass(frozen=True)
class HeldParameter:
    """A parameter with elements in this rank's share of a group.

    Attributes:
        name: its name in the whole model, the same under any layout.
        parameter: what this rank's stage computes with: the shard of its tensor rank.
        shard: how that lies in the whole parameter.
        local: the elements of the flattened parameter that are in the share.
        span: where they are in the share.
        is_counted: whether this copy stands for the parameter in a sum over the model, and in a checkpoint.
    """

    name: str
    parameter: nn.Parameter
    shard: Shard
    local: Span
    span: Span
    is_counted: bool

    @property
    def piece(self) -> Piece:
        """Return how the elements lie in the whole parameter; those that pad a vocabulary lie nowhere."""
        return Piece(self.shard, *self.local).without_padding

    @property
    def piece_span(self) -> Span:
        """Return where the elements of ``piece`` are in the share."""
        start, _ = self.span
        return start, start + self.piece.num_elements


@dataclass(frozen=True)
class FlatPartition:
    """This rank's share of one parameter group.

    Attributes:
        master: the flat fp32 weights of the share, (elements,), padding at the end included.
        held: the parameters with elements in it, in their order.
    """

    master: Tensor
    held: list[HeldParameter]

    @cached_property
    def counted(self) -> list[Span]:
        """Return where the parameters that are counted here lie in ``master``, neighbours joined."""
        return list(_joined(held.span for held in self.held if held.is_counted))

    @cached_property
    def copies(self) -> list[Span]:
        """Return where the others lie, which another rank counts; neighbours joined."""
        return list(_joined(held.span for held in self.held if not held.is_counted))


def flat_partitions(optimizer: Any, module: GptPipeline, tensor_rank: int) -> list[FlatPartition]:
    """List this rank's share of every parameter group of DeepSpeed's optimizer."""
    if hasattr(optimizer, "single_partition_of_fp32_groups"):  # DeepSpeedZeroOptimizer
        masters = optimizer.single_partition_of_fp32_groups
        groups = optimizer.bit16_groups
    else:  # BF16_Optimizer
        masters = optimizer.fp32_groups_flat_partition
        groups = optimizer.bf16_groups
    names = module.parameter_names()
    shards = parameter_shards(module)
    partitions = []
    for master, group in zip(masters, groups, strict=True):
        # DeepSpeed leaves no address at a parameter without an element in the share.
        in_share = [parameter for parameter in group if parameter._hp_mapping is not None]
        held = [_held(parameter, names[parameter], shards[parameter], tensor_rank) for parameter in in_share]
        partitions.append(FlatPartition(master, held))
    return partitions


def _held(parameter: Any, name: str, shard: Shard, tensor_rank: int) -> HeldParameter:
    low = parameter._hp_mapping.lp_fragment_address
    high = parameter._hp_mapping.hp_fragment_address
    return HeldParameter(
        name,
        parameter,
        shard,
        local=(low.start, low.start + low.numel),
        span=(high.start, high.start + high.numel),
        is_counted=_counts_here(parameter, tensor_rank),
    )


def _counts_here(parameter: Any, tensor_rank: int) -> bool:
    # Of a tied weight, DeepSpeed marks every copy but that of the first stage.
    if getattr(parameter, "ds_pipe_replicated", False):
        return False
    return is_split(parameter) or tensor_rank == 0


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
