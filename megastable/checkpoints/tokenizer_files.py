"""The tokenizer that travels with a checkpoint: its files lie beside those of the tensors, each with its checksum."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from xxhash import xxh3_128_hexdigest

from megastable.checkpoints.manifest import FILE_NAME_PATTERN, MANIFEST_NAME, TENSORS_SUFFIX, FileRecord, Manifest

MOST_BYTES = 2**28
"""Of a file: those of the largest tokenizers are a tenth of it. Whatever else lies in a folder is left there."""


def read_tokenizer_files(folder: Path) -> dict[str, bytes]:
    """Read the files of a saved tokenizer, by their names; nothing where there is no folder: tokens may come without.

    Raises:
        OSError: the folder or a file cannot be read.
    """
    if not folder.is_dir():
        return {}
    paths = [path for path in sorted(folder.iterdir()) if path.is_file() and path.stat().st_size <= MOST_BYTES]
    return {path.name: path.read_bytes() for path in paths if _can_travel(path.name)}


def _can_travel(name: str) -> bool:
    is_ours = name == MANIFEST_NAME or name.endswith(TENSORS_SUFFIX)
    return not is_ours and re.fullmatch(FILE_NAME_PATTERN, name) is not None


def write_tokenizer_files(folder: Path, files: Mapping[str, bytes]) -> dict[str, FileRecord]:
    """Write the files of a tokenizer into a checkpoint, so that they survive a power cut once this returns.

    Raises:
        OSError: a file cannot be written.
    """
    for name, content in files.items():
        with open(folder / name, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    return {
        name: FileRecord(bytes=len(content), checksum=xxh3_128_hexdigest(content)) for name, content in files.items()
    }


def tokenizer_of(checkpoint: Path, manifest: Manifest) -> dict[str, bytes]:
    """Read the tokenizer of a checkpoint; nothing where it was written without one.

    Raises:
        OSError: a file cannot be read.
    """
    return {name: (checkpoint / name).read_bytes() for name in manifest.tokenizer_files}
