"""Moves elements between pieces of parameters, and says of every parameter of a module which shard it is."""

from __future__ import annotations

from torch import Tensor, nn

from megastable.core.pieces import Piece, Shard, overlaps
from megastable.model.tensor_parallel import SplitLayer


def copy_overlap(source: Tensor, source_piece: Piece, target: Tensor, target_piece: Piece) -> int:
    """Copy the elements that two pieces of a whole have in common.

    Args:
        source: the flat elements of ``source_piece``.
        target: those of ``target_piece``, which are written.

    Returns:
        The number of elements copied.
    """
    copied = 0
    for overlap in overlaps(source_piece, target_piece):
        size = (overlap.num_rows, overlap.num_columns)
        # The storage of a view begins elsewhere.
        from_rows = source.as_strided(size, (overlap.source.stride, 1), source.storage_offset() + overlap.source.offset)
        to_rows = target.as_strided(size, (overlap.target.stride, 1), target.storage_offset() + overlap.target.offset)
        to_rows.copy_(from_rows)
        copied += overlap.num_rows * overlap.num_columns
    return copied


def cut(full: Tensor, shard: Shard) -> Tensor:
    """Copy a shard out of the whole tensor; its padding is zero."""
    part = full.new_zeros(shard.shape)
    copy_overlap(full.reshape(-1), Piece.all_of(Shard.whole(tuple(full.shape))), part.view(-1), Piece.all_of(shard))
    return part


def parameter_shards(module: nn.Module) -> dict[nn.Parameter, Shard]:
    """Say of every parameter of ``module`` which part of the whole parameter it is."""
    shards = {parameter: Shard.whole(tuple(parameter.shape)) for parameter in module.parameters()}
    for child in module.modules():
        if isinstance(child, SplitLayer):
            shards.update(child.parameter_shards())
    return shards
