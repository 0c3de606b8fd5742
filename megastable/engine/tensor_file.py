"""Writes a file in the format of safetensors, with its checksum, in one pass and without a copy of the tensors.

The package's own writer copies every tensor first, and would leave the checksum to a second pass over the file. Reading
is left to the package, which maps the file into memory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from xxhash import xxh3_128

from megastable.checkpoints.manifest import FileRecord

DTYPE_NAMES = {torch.float32: "F32", torch.float64: "F64", torch.int64: "I64", torch.uint8: "U8"}
ALIGNMENT_BYTES = 8
CHUNK_BYTES = 2**24


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> FileRecord:
    """Write contiguous tensors under their names, so that the file survives a power cut once this returns.

    Raises:
        OSError: the file cannot be written.
    """
    checksum = xxh3_128()
    size_bytes = 0
    with open(path, "wb", buffering=0) as file:
        for chunk in _chunks(tensors):
            checksum.update(chunk)
            _write_all(file.fileno(), chunk)
            size_bytes += len(chunk)
        os.fsync(file.fileno())
    return FileRecord(bytes=size_bytes, checksum=checksum.hexdigest())


def _write_all(descriptor: int, chunk: memoryview) -> None:
    # A disk that is nearly full, or a signal, may let only a part through.
    while chunk:
        chunk = chunk[os.write(descriptor, chunk) :]


def _chunks(tensors: dict[str, Tensor]) -> Iterator[memoryview]:
    """Yield the bytes of the file: the length of the header, the header, then the tensors end to end."""
    header = {}
    end = 0
    for name, tensor in tensors.items():
        start = end
        end += tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end],
        }  # fmt: skip
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT_BYTES)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for tensor in tensors.values():
        data = memoryview(tensor.detach().cpu().numpy().data).cast("B")
        for first in range(0, len(data), CHUNK_BYTES):
            yield data[first : first + CHUNK_BYTES]
