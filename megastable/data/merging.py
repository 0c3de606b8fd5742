"""Joins pairs of Megatron's indexed format to one, as its own builder does."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from filelock import FileLock, Timeout

from megastable.config.limits import LARGEST_VOCABULARY
from megastable.core.errors import UserError
from megastable.data.beside import (
    checksums_beside,
    meta_path,
    record_beside,
    same_vocabulary,
    tokenizer_beside,
    tokenizer_path,
)
from megastable.data.block_checksums import ChecksumWriter, TokenArray, describe_damage
from megastable.data.indexed_format import (
    IndexedTokens,
    Int64Array,
    check_ids,
    index_path,
    open_indexed,
    tokens_path,
    write_index,
)
from megastable.data.indexed_writer import checksums_path, hashed_dtype
from megastable.data.progress import track
from megastable.data.token_store import TokenStoreMeta, store_fingerprint, unigram_entropy_nats, write_meta

_COPY_BYTES = 1 << 24
_PATHS = (tokenizer_path, meta_path, tokens_path, checksums_path, index_path)
"""Of the files of a pair, the index last: a pair that has one is whole."""


def merge_pairs(prefixes: Sequence[Path], output: Path, *, show_progress: bool) -> IndexedTokens:
    """Write the documents of all pairs, one pair after the other, into ``output.bin`` and ``output.idx``.

    The tokenizer goes along where all pairs have the same one beside them, and a record is written where all pairs have
    one of the same vocabulary.

    Raises:
        UserError: a pair cannot be read or is damaged, the types of ids or the tokenizers differ, a file of the output
            exists, or another process is writing it.
    """
    pairs = [open_indexed(prefix) for prefix in prefixes]
    _check_alike(pairs)
    _refuse_existing(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_name(f"{output.name}.merging")
    lock = Path(f"{partial}.lock")
    try:
        with FileLock(lock, timeout=0):
            # Asked again: the process that held the lock before may have written it.
            _refuse_existing(output)
            _write_all(pairs, partial, output, show_progress)
        lock.unlink(missing_ok=True)
    except Timeout as error:
        raise UserError(f"another process is merging into {output}; wait for it, or name another output") from error
    return open_indexed(output)


def _refuse_existing(output: Path) -> None:
    for target in (path_of(output) for path_of in _PATHS):
        if target.exists():
            raise UserError(f"{target} exists, and nothing is overwritten; remove it, or name another output")


def _write_all(pairs: Sequence[IndexedTokens], partial: Path, output: Path, show_progress: bool) -> None:
    """Write everything beside the output, and move it there when all is written."""
    _remove(partial)
    try:
        _write(pairs, partial, show_progress)
        tokenizer = tokenizer_beside(pairs[0].prefix)
        if tokenizer is not None:
            shutil.copytree(tokenizer, tokenizer_path(partial))
        for path_of in _PATHS:
            if path_of(partial).exists():
                os.rename(path_of(partial), path_of(output))
    finally:
        _remove(partial)


def _remove(partial: Path) -> None:
    shutil.rmtree(tokenizer_path(partial), ignore_errors=True)
    for path_of in _PATHS:
        path_of(partial).unlink(missing_ok=True)


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
    vocabulary = _common_vocabulary(pairs)
    checksums = ChecksumWriter()
    digest = hashlib.sha256()
    counts = np.zeros(0 if vocabulary is None else vocabulary.size, np.int64)
    with tokens_path(output).open("wb") as file:
        for pair in track(pairs, f"Merging {len(pairs)} pairs", len(pairs), show=show_progress):
            for part in _verified_parts(pair):
                stored = part.tobytes()
                file.write(stored)
                checksums.append(stored)
                if vocabulary is not None:
                    digest.update(part.astype(hashed_dtype(vocabulary.size)).tobytes())
                    counts += np.bincount(part, minlength=vocabulary.size)
        file.flush()
        os.fsync(file.fileno())
    checksums.write(checksums_path(output))
    if vocabulary is not None:
        _write_record(pairs, output, vocabulary, counts, digest.digest())
    lengths = np.concatenate([pair.sequence_lengths for pair in pairs])
    bounds = [np.zeros(1, np.int64)]
    first_sequence = 0
    for pair in pairs:
        bounds.append(first_sequence + pair.document_indices[1:])
        first_sequence += len(pair.sequence_lengths)
    write_index(index_path(output), pairs[0].tokens.dtype, lengths, np.concatenate(bounds))


class _Vocabulary(NamedTuple):
    size: int
    eod_id: int


def _common_vocabulary(pairs: Sequence[IndexedTokens]) -> _Vocabulary | None:
    """Return what the records of all pairs agree in; None where they differ, or one has none."""
    records = [record_beside(pair.prefix) for pair in pairs]
    found = {None if record is None else _Vocabulary(record.vocab_size, record.eod_id) for record in records}
    return found.pop() if len(found) == 1 else None


def _verified_parts(pair: IndexedTokens) -> Iterator[TokenArray]:
    """Read all tokens of a pair and compare them with the checksums beside it: a copy gets new ones."""
    checksums = checksums_beside(pair)
    record = record_beside(pair.prefix)
    vocab_size = LARGEST_VOCABULARY if record is None else record.vocab_size
    at_once = _COPY_BYTES // pair.tokens.itemsize
    for start in range(0, len(pair.tokens), at_once):
        stop = min(start + at_once, len(pair.tokens))
        damaged = None if checksums is None else checksums.first_damaged(start, stop)
        if damaged is not None:
            found = describe_damage(pair.tokens[damaged], damaged.start, vocab_size)
            raise UserError(f"{tokens_path(pair.prefix)} has {found}; copy the pair anew or build it again")
        if record is not None:
            check_ids(pair, vocab_size, start, stop)
        yield pair.tokens[start:stop]


def _write_record(
    pairs: Sequence[IndexedTokens], output: Path, vocabulary: _Vocabulary, counts: Int64Array, digest: bytes
) -> None:
    record = TokenStoreMeta(
        dtype=pairs[0].tokens.dtype.str,
        num_documents=sum(pair.num_documents for pair in pairs),
        num_empty_documents=0,
        num_train_tokens=int(counts.sum()),
        num_validation_tokens=0,
        vocab_size=vocabulary.size,
        eod_id=vocabulary.eod_id,
        unigram_entropy_nats=unigram_entropy_nats(counts),
        fingerprint=store_fingerprint(digest, hashlib.sha256().digest()),
    )
    write_meta(meta_path(output), record)
