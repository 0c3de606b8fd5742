"""Comparing a checkpoint's files with the checksums that its manifest has of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from xxhash import xxh3_128

from megastable.checkpoints.folder import fault_of_size
from megastable.checkpoints.manifest import FileRecord, read_manifest
from megastable.core.errors import UserError

CHUNK_BYTES: Final = 2**22


def _unwatched(read_bytes: int) -> None:
    """Take no notice of the progress."""


def file_checksum(path: Path, progress: Callable[[int], None] = _unwatched) -> str:
    """Compute the xxh3_128 of a file, in hexadecimal.

    Args:
        progress: called with the number of bytes of every chunk that was read.

    Raises:
        OSError: it cannot be read.
    """
    checksum = xxh3_128()
    buffer = memoryview(bytearray(CHUNK_BYTES))
    with open(path, "rb", buffering=0) as file:
        while read_bytes := file.readinto(buffer):
            checksum.update(buffer[:read_bytes])
            progress(read_bytes)
    return checksum.hexdigest()


def faults_of_file(
    folder: Path, name: str, record: FileRecord, progress: Callable[[int], None] = _unwatched
) -> str | None:
    """Say why the file ``name`` of a checkpoint is not the one that was written; None where it is."""
    path = folder / name
    fault = fault_of_size(path, record.bytes)
    if fault is not None:
        return fault
    try:
        checksum = file_checksum(path, progress)
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    if checksum != record.checksum:
        return f"{name} has the checksum {checksum} instead of {record.checksum}: its content has changed"
    return None


def verify(folder: Path, progress: Callable[[int], None] = _unwatched) -> list[str]:
    """Read a whole checkpoint and list everything that is wrong with it; nothing where it is whole."""
    try:
        manifest = read_manifest(folder)
    except UserError as error:
        return [str(error)]
    found = (faults_of_file(folder, name, record, progress) for name, record in manifest.files.items())
    return [f"{folder} is damaged: {fault}" for fault in found if fault is not None]
