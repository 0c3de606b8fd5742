"""The files of an exported model: which tensors go into which, and the index over them, as `transformers` has them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from megastable.core.errors import UserError
from megastable.engine.tensor_file import TensorEntry

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
METADATA = {"format": "pt"}
"""Without it transformers refuses a file."""
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_size(text: str) -> int:
    """Read a size such as ``5GB``, ``500 MiB`` or a number of bytes.

    Raises:
        UserError: it is none.
    """
    found = re.fullmatch(r"\s*(\d{1,15})\s*([A-Za-z]*)\s*", text)
    unit = UNITS.get(found[2].upper()) if found else None
    if found is None or unit is None or int(found[1]) == 0:
        raise UserError(f"--max-shard-size {text}: must be a whole number of a unit, such as 5GB, 1500MB or 2GiB")
    return int(found[1]) * unit


def split_into_shards(entries: Sequence[TensorEntry], most_bytes: int) -> list[list[TensorEntry]]:
    """Fill one file after the other up to ``most_bytes``; a tensor that is larger has a file of its own."""
    shards: list[list[TensorEntry]] = [[]]
    size = 0
    for entry in entries:
        if shards[-1] and size + entry.num_bytes > most_bytes:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += entry.num_bytes
    return shards


def shard_name(index: int, count: int) -> str:
    """Name the file ``index`` of ``count``, counted from 0; a single one has no number."""
    if count == 1:
        return WEIGHTS_NAME
    return f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def write_index(folder: Path, shards: Sequence[Sequence[TensorEntry]]) -> None:
    """Write which file holds which tensor; a single file needs no index.

    Raises:
        OSError: the file cannot be written.
    """
    if len(shards) == 1:
        return
    entries = [entry for shard in shards for entry in shard]
    size = sum(entry.num_bytes for entry in entries)
    metadata = {
        "total_parameters": sum(entry.num_bytes // entry.dtype.itemsize for entry in entries),
        "total_size": size,
    }
    weight_map = {entry.name: shard_name(index, len(shards)) for index, shard in enumerate(shards) for entry in shard}
    text = json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2, sort_keys=True)
    (folder / INDEX_NAME).write_text(text + "\n", encoding="utf-8")
