"""Joins pairs of Megatron's indexed format to one, as its own builder does."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megastable.core.errors import UserError
from megastable.data.beside import meta_path, record_beside, same_vocabulary, tokenizer_beside, tokenizer_path
from megastable.data.block_checksums import ChecksumWriter
from megastable.data.indexed_format import IndexedTokens, index_path, open_indexed, tokens_path, write_index
from megastable.data.indexed_writer import checksums_path
from megastable.data.progress import track

_COPY_BYTES = 1 << 24


def merge_pairs(prefixes: Sequence[Path], output: Path, *, show_progress: bool) -> IndexedTokens:
    """Write the documents of all pairs, one pair after the other, into ``output.bin`` and ``output.idx``.

    The tokenizer goes along where all pairs have the same one beside them.

    Raises:
        UserError: a pair cannot be read, the types of ids or the tokenizers differ, or a file of the output exists.
    """
    pairs = [open_indexed(prefix) for prefix in prefixes]
    _check_alike(pairs)
    targets = [path_of(output) for path_of in (tokens_path, checksums_path, index_path, tokenizer_path, meta_path)]
    for target in targets:
        if target.exists():
            raise UserError(f"{target} exists, and nothing is overwritten; remove it, or name another output")
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_name(f"{output.name}.merging")
    try:
        _write(pairs, partial, show_progress)
        tokenizer = tokenizer_beside(prefixes[0])
        if tokenizer is not None:
            shutil.copytree(tokenizer, tokenizer_path(output))
        # The index last: a pair that has one is whole.
        for path_of in (tokens_path, checksums_path, index_path):
            os.rename(path_of(partial), path_of(output))
    finally:
        for path_of in (tokens_path, checksums_path, index_path):
            path_of(partial).unlink(missing_ok=True)
    return open_indexed(output)


def _check_alike(pairs: Sequence[IndexedTokens]) -> None:
    first = pairs[0]
    for pair in pairs:
        record = record_beside(pair.prefix)
        if record is not None and record.has_prompts:
            # The result has no record, without which its prompts would be learned.
            raise UserError(f"{pair.prefix} has prompts and completions, which are not merged; blend it in a run file")
    for pair in pairs[1:]:
        if pair.tokens.dtype != first.tokens.dtype:
            raise UserError(
                f"{tokens_path(pair.prefix)} has ids of {pair.tokens.dtype.name}, {tokens_path(first.prefix)} of "
                f"{first.tokens.dtype.name}: they are of different vocabularies"
            )
        if not _same_tokenizer(tokenizer_beside(first.prefix), tokenizer_beside(pair.prefix)):
            raise UserError(
                f"{pair.prefix} was made with another tokenizer than {first.prefix}, as far as the folders beside "
                "them tell: the same id would mean different text"
            )


def _same_tokenizer(first: Path | None, second: Path | None) -> bool:
    if first is None or second is None:
        return first is second
    same = same_vocabulary(first, second)
    return _contents(first) == _contents(second) if same is None else same


def _contents(folder: Path) -> dict[Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _write(pairs: Sequence[IndexedTokens], output: Path, show_progress: bool) -> None:
    checksums = ChecksumWriter()
    with tokens_path(output).open("wb") as file:
        for pair in track(pairs, f"Merging {len(pairs)} pairs", len(pairs), show=show_progress):
            stored = pair.tokens.view(np.uint8)
            for start in range(0, len(stored), _COPY_BYTES):
                part = stored[start : start + _COPY_BYTES].tobytes()
                file.write(part)
                checksums.append(part)
        file.flush()
        os.fsync(file.fileno())
    checksums.write(checksums_path(output))
    lengths = np.concatenate([pair.sequence_lengths for pair in pairs])
    bounds = [np.zeros(1, np.int64)]
    first_sequence = 0
    for pair in pairs:
        bounds.append(first_sequence + pair.document_indices[1:])
        first_sequence += len(pair.sequence_lengths)
    write_index(index_path(output), pairs[0].tokens.dtype, lengths, np.concatenate(bounds))
