"""Writes a file in the format of safetensors, with its checksum, in one pass and without a copy of the tensors.

The package's own writer copies every tensor first, wants all of them at once, and would leave the checksum to a second
pass over the file. Reading is left to the package, which maps the file into memory.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from xxhash import xxh3_128

from megastable.checkpoints.manifest import FileRecord

DTYPE_NAMES = {
    torch.float32: "F32", torch.float64: "F64", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.uint8: "U8",
}  # fmt: skip
ALIGNMENT_BYTES = 8
CHUNK_BYTES = 2**24


@dataclass(frozen=True)
class TensorEntry:
    """What the head of a file says of one tensor, before the tensor itself is there."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> FileRecord:
    """Write contiguous tensors under their names, so that the file survives a power cut once this returns.

    Raises:
        OSError: the file cannot be written.
    """
    entries = [TensorEntry(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    return write_tensor_stream(path, entries, tensors.values())


def write_tensor_stream(
    path: Path, entries: Iterable[TensorEntry], tensors: Iterable[Tensor], metadata: Mapping[str, str] | None = None
) -> FileRecord:
    """Write contiguous tensors as they come, so that the file survives a power cut once this returns.

    Args:
        entries: of the tensors, in their order.
        metadata: texts that the head of the file holds beside them.

    Raises:
        OSError: the file cannot be written.
    """
    checksum = xxh3_128()
    size_bytes = 0
    with open(path, "wb", buffering=0) as file:
        for chunk in _chunks(list(entries), tensors, metadata):
            checksum.update(chunk)
            _write_all(file.fileno(), chunk)
            size_bytes += len(chunk)
        os.fsync(file.fileno())
    return FileRecord(bytes=size_bytes, checksum=checksum.hexdigest())


def _write_all(descriptor: int, chunk: memoryview) -> None:
    # A disk that is nearly full, or a signal, may let only a part through.
    while chunk:
        chunk = chunk[os.write(descriptor, chunk) :]


def _chunks(
    entries: list[TensorEntry], tensors: Iterable[Tensor], metadata: Mapping[str, str] | None
) -> Iterator[memoryview]:
    """Yield the bytes of the file: the length of the header, the header, then the tensors end to end."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    end = 0
    for entry in entries:
        start = end
        end += entry.num_bytes
        header[entry.name] = {
            "dtype": DTYPE_NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": [start, end],
        }  # fmt: skip
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT_BYTES)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for entry, tensor in zip(entries, tensors, strict=True):
        assert (tensor.dtype, tuple(tensor.shape)) == (entry.dtype, entry.shape), entry.name
        # As bytes, because numpy has no bfloat16; a tensor without dimensions has no other view of its bytes.
        data = memoryview(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
        for first in range(0, len(data), CHUNK_BYTES):
            yield data[first : first + CHUNK_BYTES]
