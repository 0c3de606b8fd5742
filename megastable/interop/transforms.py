"""Turns one of our whole tensors into theirs, and theirs into ours, by the tables of ``core.families``."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from megastable.core.errors import UserError
from megastable.core.families.family import MappedTensor, Part
from megastable.core.pieces import Piece, Shard
from megastable.model.pieces import copy_overlap, cut


def to_theirs(ours: Tensor, mapped: MappedTensor) -> dict[str, Tensor]:
    """Cut a whole tensor of ours, of the shape of ``mapped``, into contiguous ones of theirs by their names."""
    return {part.name: one_of_theirs(ours, mapped, part) for part in mapped.parts}


def one_of_theirs(ours: Tensor, mapped: MappedTensor, part: Part) -> Tensor:
    """Take one tensor of theirs out of a whole one of ours: a contiguous copy, or ours where both are the same."""
    if part.rows == ((0, mapped.shape[0]),) and not part.transposed:
        return ours
    rows = cut(ours, mapped.shard_of(part))
    return rows.t().contiguous() if part.transposed else rows


def to_ours(theirs: Mapping[str, Tensor], mapped: MappedTensor) -> Tensor:
    """Put a whole tensor of ours together from theirs, which are looked up by their names.

    Raises:
        UserError: one of them is missing or of another shape.
    """
    first = theirs.get(mapped.parts[0].name)
    if first is None:
        raise UserError(f"the model has no tensor {mapped.parts[0].name}")
    ours = first.new_empty(mapped.shape)
    whole = Piece.all_of(Shard.whole(mapped.shape))
    for part in mapped.parts:
        tensor = theirs.get(part.name)
        expected = mapped.shape_of(part)
        if tensor is None:
            raise UserError(f"the model has no tensor {part.name}")
        if tuple(tensor.shape) != expected:
            raise UserError(f"{part.name} has the shape {tuple(tensor.shape)}, and must have {expected}")
        rows = (tensor.t() if part.transposed else tensor).contiguous()
        copy_overlap(rows.view(-1), Piece.all_of(mapped.shard_of(part)), ours.view(-1), whole)
    return ours
