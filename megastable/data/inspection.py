"""Looks at a pair of Megatron's indexed format: counts, lengths, equal documents, and what stands in one."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from megastable.config.limits import LARGEST_VOCABULARY
from megastable.core.errors import UserError, first_line, shown
from megastable.data.beside import checksums_beside, record_beside, tokenizer_beside
from megastable.data.block_checksums import describe_damage
from megastable.data.indexed_format import IndexedTokens, open_indexed, tokens_path
from megastable.data.progress import track
from megastable.data.token_store import TokenStoreMeta

SAMPLE_TOKENS = 200
_DOCUMENTS_AT_ONCE = 1 << 14
_TOKENS_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class Inspection:
    """What is known of a pair after all of it was read."""

    prefix: str
    dtype: str
    documents: int
    empty_documents: int
    duplicate_documents: int
    """Documents with text that are equal to one before them."""
    duplicate_tokens: int
    tokens: int
    shortest: int
    median: int
    mean: float
    p95: int
    longest: int
    """Tokens of a document."""
    smallest_id: int | None
    largest_id: int | None
    vocab_size: int | None
    """Of the record beside the pair; None for a pair of another tool."""
    ids_outside: int | None
    """Tokens outside the vocabulary; None where that is not known."""
    not_ended: int | None
    """Documents whose last id is not the vocabulary's end of document; None where that is not known."""
    damage: str | None
    """What the tokens have instead of what was written; None where checksums find nothing, or there are none."""

    @property
    def faults(self) -> list[str]:
        """Say what a run on these tokens would refuse."""
        found = []
        if self.ids_outside:
            found.append(
                f"{self.ids_outside:,} tokens have ids outside the vocabulary of {self.vocab_size:,}: "
                f"{self.smallest_id} to {self.largest_id:,}"
            )
        if self.damage is not None:
            found.append(f"the tokens are damaged: {self.damage}")
        return found


def inspect_pair(prefix: Path, *, show_progress: bool) -> Inspection:
    """Read a pair.

    Raises:
        UserError: a file cannot be read, or does not fit the other one.
    """
    opened = open_indexed(prefix)
    record = record_beside(prefix)
    lengths = _document_lengths(opened)
    # As a plain array: a slice of a memory map costs several times as much.
    tokens = np.asarray(opened.tokens)
    ends = np.cumsum(lengths)
    smallest, largest, outside = _range_of(tokens, record, show_progress)
    not_ended = None
    if record is not None:
        not_ended = int(np.count_nonzero(tokens[ends[lengths > 0] - 1] != record.eod_id))
    duplicates, duplicate_tokens = _count_duplicates(tokens, lengths, ends, show_progress)
    has_documents = len(lengths) > 0
    return Inspection(
        prefix=str(prefix),
        dtype=tokens.dtype.name,
        documents=len(lengths),
        empty_documents=int(np.count_nonzero(lengths == 0)),
        duplicate_documents=duplicates,
        duplicate_tokens=duplicate_tokens,
        tokens=len(tokens),
        shortest=int(lengths.min()) if has_documents else 0,
        median=int(np.median(lengths)) if has_documents else 0,
        mean=float(lengths.mean()) if has_documents else 0.0,
        p95=int(np.percentile(lengths, 95, method="lower")) if has_documents else 0,
        longest=int(lengths.max()) if has_documents else 0,
        smallest_id=smallest,
        largest_id=largest,
        vocab_size=None if record is None else record.vocab_size,
        ids_outside=outside,
        not_ended=not_ended,
        damage=_damage(opened, record, show_progress),
    )


def decoded_document(prefix: Path, index: int, tokenizer_folder: Path | None) -> str:
    """Return the begin of a document as text, with all that a terminal would obey written as escapes.

    Args:
        tokenizer_folder: of the tokenizer that made it; None takes the one beside the pair.

    Raises:
        UserError: there is no such document or no tokenizer.
    """
    opened = open_indexed(prefix)
    if not 0 <= index < opened.num_documents:
        raise UserError(f"--document {index}: {tokens_path(prefix)} has documents 0 to {opened.num_documents - 1:,}")
    folder = tokenizer_folder or tokenizer_beside(prefix)
    if folder is None:
        raise UserError(f"{prefix} has no tokenizer beside it; name its folder with --tokenizer")
    ids = opened.document(index)[:SAMPLE_TOKENS].tolist()
    text = _decode(folder, ids)
    more = " ..." if len(opened.document(index)) > SAMPLE_TOKENS else ""
    return shown(text) + more


def _decode(folder: Path, ids: list[int]) -> str:
    from tokenizers import Tokenizer

    try:
        return str(Tokenizer.from_file(str(folder / "tokenizer.json")).decode(ids, skip_special_tokens=False))
    except Exception as error:  # the package raises plain exceptions
        raise UserError(f"{folder} has no tokenizer.json that can be read ({first_line(error)})") from error


def _document_lengths(opened: IndexedTokens) -> npt.NDArray[np.int64]:
    """Count the tokens of every document, shape [documents]."""
    ends = np.concatenate([[0], np.cumsum(opened.sequence_lengths, dtype=np.int64)])
    return np.diff(ends[opened.document_indices])


def _range_of(
    tokens: npt.NDArray[Any], record: TokenStoreMeta | None, show_progress: bool
) -> tuple[int | None, int | None, int | None]:
    """Return the smallest and largest id, and how many are outside the vocabulary."""
    if len(tokens) == 0:
        return None, None, None if record is None else 0
    starts = range(0, len(tokens), _TOKENS_AT_ONCE)
    smallest = largest = int(tokens[0])
    outside = 0
    for start in track(starts, f"Reading {len(tokens):,} tokens", len(starts), show=show_progress):
        part = tokens[start : start + _TOKENS_AT_ONCE]
        smallest = min(smallest, int(part.min()))
        largest = max(largest, int(part.max()))
        if record is not None:
            outside += int(np.count_nonzero((part < 0) | (part >= record.vocab_size)))
    return smallest, largest, None if record is None else outside


def _damage(opened: IndexedTokens, record: TokenStoreMeta | None, show_progress: bool) -> str | None:
    """Compare the tokens with the checksums beside them, and say what the first block that differs has."""
    checksums = checksums_beside(opened)
    if checksums is None:
        return None
    starts = range(0, len(opened.tokens), _TOKENS_AT_ONCE)
    for start in track(starts, "Comparing them with their checksums", len(starts), show=show_progress):
        damaged = checksums.first_damaged(start, min(start + _TOKENS_AT_ONCE, len(opened.tokens)))
        if damaged is not None:
            vocab_size = LARGEST_VOCABULARY if record is None else record.vocab_size
            return describe_damage(opened.tokens[damaged], damaged.start, vocab_size)
    return None


def _count_duplicates(
    tokens: npt.NDArray[Any], lengths: npt.NDArray[np.int64], ends: npt.NDArray[np.int64], show_progress: bool
) -> tuple[int, int]:
    """Count documents that are equal to an earlier one, and their tokens, by a hash of 64 bits.

    Among a hundred million documents, two that differ have the same hash with a probability of 1 in 3,700.
    """
    hashes = array("Q")
    parts = range(0, len(lengths), _DOCUMENTS_AT_ONCE)
    for first in track(parts, f"Comparing {len(lengths):,} documents", len(parts), show=show_progress):
        some = slice(first, first + _DOCUMENTS_AT_ONCE)
        for end, length in zip(ends[some].tolist(), lengths[some].tolist(), strict=True):
            hashes.append(xxh3_64_intdigest(tokens[end - length : end].data))
    with_text = lengths > 0
    found = np.frombuffer(hashes, np.uint64)[with_text] if len(hashes) else np.zeros(0, np.uint64)
    _, first_places = np.unique(found, return_index=True)
    is_repeated = np.ones(len(found), np.bool_)
    is_repeated[first_places] = False
    return int(is_repeated.sum()), int(lengths[with_text][is_repeated].sum())
