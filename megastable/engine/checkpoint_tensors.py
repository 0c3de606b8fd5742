"""Reads named, whole tensors or pieces of them out of a checkpoint's files, whatever layout has written them.

A load and an export read alike. Neither DeepSpeed nor a process group is needed here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megastable.checkpoints.manifest import Manifest
from megastable.core.errors import UserError
from megastable.core.pieces import Piece, Shard, overlaps
from megastable.model.pieces import copy_overlap

MASTER = "master"
MOMENTS = ("exp_avg", "exp_avg_sq")
KINDS = (MASTER, *MOMENTS)


def file_name(rank: int) -> str:
    """Return the name of the file that ``rank`` writes."""
    return f"rank_{rank:05d}.safetensors"


def tensor_key(kind: str, name: str) -> str:
    """Return the name in a file of the tensor ``name`` of a kind."""
    return f"{kind}/{name}"


def read_piece(folder: Path, manifest: Manifest, name: str, piece: Piece, flats: dict[str, Tensor]) -> None:
    """Fill a piece of one tensor from whatever files hold some of it.

    Args:
        flats: kind to the flat fp32 elements of ``piece``, which are written.

    Raises:
        UserError: the checkpoint does not have the tensor, or a file cannot be read.
    """
    record = manifest.tensors.get(name)
    shape = piece.shard.full_shape
    if record is None or record.shape != shape:
        found = "is not in it" if record is None else f"has the shape {list(record.shape)} there"
        raise UserError(f"{folder} is of another model: {name}, here of shape {list(shape)}, {found}")
    for written in record.pieces:
        source = Piece(Shard(shape, written.dim, written.ranges), written.start, written.stop)
        if next(overlaps(source, piece), None) is None:
            continue
        # Opened for one tensor at a time: what was mapped into memory of it is then given back.
        with opened(folder / written.file) as file:
            for kind, flat in flats.items():
                values = _tensor(file, folder / written.file, tensor_key(kind, name), source.num_elements)
                copy_overlap(values, source, flat, piece)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Any]:
    """Map a file of tensors into memory.

    Raises:
        UserError: it cannot be read.
    """
    try:
        # By its descriptor, because the package refuses names that are not UTF-8.
        with open(path, "rb") as file, safe_open(f"/dev/fd/{file.fileno()}", framework="pt") as tensors:
            yield tensors
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error


def _tensor(file: Any, path: Path, key: str, num_elements: int) -> Tensor:
    """Return a flat fp32 tensor that lies in the mapped file.

    Raises:
        UserError: it is of another type or size than its piece.
    """
    tensor: Tensor = file.get_tensor(key)
    if tensor.dtype != torch.float32 or tensor.shape != (num_elements,):
        raise UserError(
            f"{path} is damaged: {key} is {tensor.dtype} of shape {list(tensor.shape)}, and its piece has "
            f"{num_elements} elements of fp32"
        )
    return tensor
