"""Megatron's indexed format: a ``.bin`` of token ids, and an ``.idx`` that says where every document lies in it.

The layout, all of it little-endian, is that of ``megatron/core/datasets/indexed_dataset.py``:

    MMIDIDX\\0\\0    9 bytes
    version         uint64, 1
    dtype code      uint8, of the ids in the ``.bin``
    sequences       uint64, n
    documents       uint64, d + 1
    lengths         int32 [n], tokens of each sequence
    pointers        int64 [n], byte at which each sequence begins
    documents       int64 [d + 1], sequence at which each document begins, and n

A document is one sequence, but for one with more tokens than an int32 counts.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from megastable.core.errors import UserError
from megastable.data.block_checksums import TokenArray

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""Of the codes that Megatron writes, those of whole numbers; 6 and 7 are floats, which are no token ids."""
SMALLEST_WIDE_VOCABULARY = 65_500
"""From here on Megatron writes 32 bits an id, though 16 would hold a few more."""
LONGEST_SEQUENCE = 2**31 - 1

_CHECKED_AT_ONCE = 1 << 20
"""Sequences whose numbers are in memory together while an index is checked or written."""

Int64Array = npt.NDArray[np.int64]


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the type of the ids of a vocabulary: Megatron's choice, which no id overflows."""
    return np.dtype("<u2" if vocab_size < SMALLEST_WIDE_VOCABULARY else "<i4")


def index_path(prefix: Path) -> Path:
    """Return the index of a pair; a prefix may have dots of its own."""
    return prefix.with_name(f"{prefix.name}.idx")


def tokens_path(prefix: Path) -> Path:
    """Return the token ids of a pair."""
    return prefix.with_name(f"{prefix.name}.bin")


@dataclass(frozen=True)
class IndexedTokens:
    """A pair that is mapped into memory; nothing of it is copied."""

    prefix: Path
    tokens: TokenArray = field(repr=False)
    """All ids, one document after another."""
    sequence_lengths: npt.NDArray[np.int32] = field(repr=False)
    sequence_pointers: Int64Array = field(repr=False)
    document_indices: Int64Array = field(repr=False)

    @property
    def num_documents(self) -> int:
        """Count the documents."""
        return len(self.document_indices) - 1

    def document_bounds(self, index: int) -> tuple[int, int]:
        """Return the first token of a document, and the one after its last."""
        return self._first_token(int(self.document_indices[index])), self._first_token(
            int(self.document_indices[index + 1])
        )

    def document(self, index: int) -> TokenArray:
        """Map the ids of one document."""
        start, stop = self.document_bounds(index)
        return self.tokens[start:stop]

    def _first_token(self, sequence: int) -> int:
        if sequence == len(self.sequence_pointers):
            return len(self.tokens)
        return int(self.sequence_pointers[sequence]) // self.tokens.itemsize


def open_indexed(prefix: Path) -> IndexedTokens:
    """Map a pair into memory, and check that sizes, offsets and documents fit together.

    The ids are not read; ``check_ids`` does that.

    Raises:
        UserError: naming the file and what is wrong with it.
    """
    path = index_path(prefix)
    stored = _map(path, np.dtype(np.uint8))
    if len(stored) < HEADER.size:
        _refuse(path, f"has {len(stored):,} bytes, less than its header of {HEADER.size}")
    magic, version, code, num_sequences, num_bounds = HEADER.unpack(stored[: HEADER.size].tobytes())
    if magic != MAGIC:
        _refuse(path, f"begins with {magic!r} instead of {MAGIC!r}: it is no index of Megatron's format")
    if version != VERSION:
        _refuse(path, f"is of version {version:,}; legal is {VERSION}")
    if code not in DTYPES:
        _refuse(path, f"has ids of the type {code}; legal are {', '.join(map(str, DTYPES))}, whole numbers")
    expected = HEADER.size + (4 + 8) * num_sequences + 8 * num_bounds
    if len(stored) != expected:
        modes = ""
        if len(stored) == expected + num_sequences:
            modes = "; it seems to have a mode for each sequence, as of several modalities, which are not read here"
        _refuse(
            path,
            f"has {len(stored):,} bytes instead of {expected:,} for {num_sequences:,} sequences and "
            f"{num_bounds:,} bounds of documents{modes}",
        )
    tokens = _map(tokens_path(prefix), np.dtype(DTYPES[code]))
    lengths, pointers, bounds = np.split(
        stored[HEADER.size :], [4 * num_sequences, (4 + 8) * num_sequences]
    )  # (n * 4,), (n * 8,), (bounds * 8,) bytes
    opened = IndexedTokens(prefix, tokens, lengths.view("<i4"), pointers.view("<i8"), bounds.view("<i8"))
    _check_sequences(opened)
    _check_documents(opened)
    return opened


def check_ids(opened: IndexedTokens, vocab_size: int, start: int, stop: int) -> None:
    """Refuse ids outside ``[0, vocab_size)`` among the tokens ``[start, stop)``.

    Raises:
        UserError: naming the file, the first such id and its place.
    """
    tokens = opened.tokens[start:stop]
    if len(tokens) == 0 or (tokens.min() >= 0 and tokens.max() < vocab_size):
        return
    first = int(np.flatnonzero((tokens < 0) | (tokens >= vocab_size))[0])
    _refuse(
        tokens_path(opened.prefix),
        f"has the id {int(tokens[first])} at token {start + first:,}, outside the vocabulary of {vocab_size:,}",
    )


def write_index(
    path: Path, dtype: npt.DTypeLike, lengths: npt.NDArray[np.integer[Any]], bounds: Int64Array | None = None
) -> None:
    """Write the index of documents that lie one after another.

    Args:
        lengths: tokens of each sequence, shape [n].
        bounds: sequence at which each document begins, and n; None where every sequence is a document, of any length.
    """
    code = {np.dtype(known): code for code, known in DTYPES.items()}[np.dtype(dtype)]
    itemsize = np.dtype(dtype).itemsize
    if bounds is None:
        bounds = np.arange(len(lengths) + 1)
        if len(lengths) and int(lengths.max()) > LONGEST_SEQUENCE:
            lengths, bounds = _cut_long(lengths)
    with path.open("wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, code, len(lengths), len(bounds)))
        for start in range(0, len(lengths), _CHECKED_AT_ONCE):
            file.write(lengths[start : start + _CHECKED_AT_ONCE].astype("<i4").tobytes())
        first_byte = 0
        for start in range(0, len(lengths), _CHECKED_AT_ONCE):
            ends = first_byte + np.cumsum(lengths[start : start + _CHECKED_AT_ONCE], dtype=np.int64) * itemsize
            file.write(np.concatenate([[first_byte], ends[:-1]]).astype("<i8").tobytes())
            first_byte = int(ends[-1])
        for start in range(0, len(bounds), _CHECKED_AT_ONCE):
            file.write(bounds[start : start + _CHECKED_AT_ONCE].astype("<i8").tobytes())


def _cut_long(document_lengths: npt.NDArray[Any]) -> tuple[Int64Array, Int64Array]:
    """Cut documents into sequences whose length an int32 holds; returns the lengths and the bounds of documents."""
    num_sequences = np.maximum(1, -(-document_lengths // LONGEST_SEQUENCE)).astype(np.int64)  # (documents,)
    bounds = np.concatenate([[0], np.cumsum(num_sequences)])
    lengths = np.full(int(bounds[-1]), LONGEST_SEQUENCE, np.int64)
    lengths[bounds[1:] - 1] = document_lengths - (num_sequences - 1) * LONGEST_SEQUENCE
    return lengths, bounds


def _check_sequences(opened: IndexedTokens) -> None:
    """Refuse sequences that do not lie one after another, from the first byte of the tokens to the last."""
    path = index_path(opened.prefix)
    next_byte = 0
    for start in range(0, len(opened.sequence_lengths), _CHECKED_AT_ONCE):
        lengths = opened.sequence_lengths[start : start + _CHECKED_AT_ONCE].astype(np.int64)
        pointers = opened.sequence_pointers[start : start + _CHECKED_AT_ONCE]
        if lengths.min() < 0:
            sequence = int(np.argmax(lengths < 0))
            _refuse(path, f"gives sequence {start + sequence:,} a length of {lengths[sequence]:,}")
        ends = next_byte + np.cumsum(lengths) * opened.tokens.itemsize
        expected = np.concatenate([[next_byte], ends[:-1]])
        wrong = pointers != expected
        if wrong.any():
            sequence = int(np.argmax(wrong))
            _refuse(
                path,
                f"says that sequence {start + sequence:,} begins at byte {pointers[sequence]:,}, but those before "
                f"it end at {expected[sequence]:,}",
            )
        next_byte = int(ends[-1])
    if next_byte != opened.tokens.nbytes:
        _refuse(
            tokens_path(opened.prefix),
            f"has {opened.tokens.nbytes:,} bytes instead of the {next_byte:,} of {path.name}",
        )


def _check_documents(opened: IndexedTokens) -> None:
    """Refuse documents that do not have every sequence once, in order."""
    path = index_path(opened.prefix)
    bounds = opened.document_indices
    num_sequences = len(opened.sequence_lengths)
    if len(bounds) == 0 or bounds[0] != 0 or bounds[-1] != num_sequences:
        found = f"{bounds[0]:,} to {bounds[-1]:,}" if len(bounds) else "none"
        _refuse(path, f"has documents over the sequences {found} instead of 0 to {num_sequences:,}")
    for start in range(0, len(bounds) - 1, _CHECKED_AT_ONCE):
        some = bounds[start : start + _CHECKED_AT_ONCE + 1]
        # Compared, since a difference of damaged bounds may wrap around.
        falling = some[1:] < some[:-1]
        if falling.any():
            document = start + int(np.argmax(falling))
            _refuse(path, f"says that document {document:,} ends before it begins")


def _map(path: Path, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    try:
        num_bytes = path.stat().st_size
        if num_bytes % dtype.itemsize:
            _refuse(path, f"has {num_bytes:,} bytes, which are no whole number of ids of {dtype.itemsize} bytes")
        # An empty file cannot be mapped.
        return np.memmap(path, dtype, mode="r") if num_bytes else np.zeros(0, dtype)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})") from error


def _refuse(path: Path, why: str) -> NoReturn:
    raise UserError(f"{path} {why}")
