"""Turns one of our whole tensors into theirs, and theirs into ours, by the tables of ``core.families``."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce

import torch
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

    Its number format is one that holds all of theirs exactly.

    Raises:
        UserError: one of them is missing or of another shape.
    """
    parts = [_checked(theirs, mapped, part) for part in mapped.parts]
    # Parts may have several formats: that of the first would round the others.
    number_format = reduce(torch.promote_types, [tensor.dtype for tensor in parts])
    ours = parts[0].new_empty(mapped.shape, dtype=number_format)
    whole = Piece.all_of(Shard.whole(mapped.shape))
    for part, tensor in zip(mapped.parts, parts, strict=True):
        rows = (tensor.t() if part.transposed else tensor).contiguous()
        copy_overlap(rows.view(-1), Piece.all_of(mapped.shard_of(part)), ours.view(-1), whole)
    return ours


def _checked(theirs: Mapping[str, Tensor], mapped: MappedTensor, part: Part) -> Tensor:
    """Look one tensor of theirs up.

    Raises:
        UserError: it is missing or of another shape.
    """
    tensor = theirs.get(part.name)
    expected = mapped.shape_of(part)
    if tensor is None:
        raise UserError(f"the model has no tensor {part.name}")
    if tuple(tensor.shape) != expected:
        raise UserError(f"{part.name} has the shape {tuple(tensor.shape)}, and must have {expected}")
    return tensor
