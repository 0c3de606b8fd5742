"""Writes a pair of Megatron's indexed format in steps that a later start can go on from."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megastable.data.block_checksums import ChecksumWriter
from megastable.data.indexed_format import index_path, token_dtype, tokens_path, write_index

_READ_BYTES = 1 << 24
_LENGTH_DTYPE = np.dtype("<i8")
NARROW_VOCABULARY = 1 << 16


@dataclass(frozen=True)
class Written:
    """How much of a pair is on disk."""

    tokens: int = 0
    sequences: int = 0


NOTHING_WRITTEN = Written()


class IndexedWriter:
    """Appends documents to a pair, counts their tokens by id, hashes them and takes the checksums of their blocks."""

    def __init__(
        self, prefix: Path, vocab_size: int, kept: Written = NOTHING_WRITTEN, *, has_prompts: bool = False
    ) -> None:
        """Open the pair, and drop all but what is ``kept`` of an unfinished one.

        Args:
            vocab_size: ids are in ``[0, vocab_size)``; it decides their type.
            has_prompts: every document has two sequences, a prompt and a completion; otherwise one.
        """
        self.dtype = token_dtype(vocab_size)
        self.digest = hashlib.sha256()
        self.counts = np.zeros(vocab_size, dtype=np.int64)
        self._hashed_dtype = hashed_dtype(vocab_size)
        self._prefix = prefix
        self._has_prompts = has_prompts
        self._checksums = ChecksumWriter()
        self._written = kept
        self._open_tokens = 0
        self._tokens_file = _open_at(tokens_path(prefix), 0)
        kept_bytes = kept.tokens * self.dtype.itemsize
        for start in range(0, kept_bytes, _READ_BYTES):
            stored = self._tokens_file.read(min(_READ_BYTES, kept_bytes - start))
            self._count(stored, np.frombuffer(stored, self.dtype))
        self._tokens_file.truncate(kept_bytes)
        self._tokens_file.seek(kept_bytes)
        self._lengths_file = _open_at(lengths_path(prefix), kept.sequences * _LENGTH_DTYPE.itemsize)
        self._lengths_file.truncate()

    def append(self, ids: npt.NDArray[Any], ends: npt.NDArray[np.int64]) -> None:
        """Write token ids at the end of the pair.

        Args:
            ids: of any number of sequences, the first and the last of which may go on, shape [n].
            ends: where sequences end in ``ids``, shape [m], rising. What is after the last goes on with the next call.
        """
        stored = ids.astype(self.dtype).tobytes()
        self._tokens_file.write(stored)
        self._count(stored, ids)
        sequences = self._written.sequences + len(ends)
        if len(ends):
            lengths = np.diff(ends, prepend=-self._open_tokens)
            self._lengths_file.write(lengths.astype(_LENGTH_DTYPE).tobytes())
            self._open_tokens = len(ids) - int(ends[-1])
        else:
            self._open_tokens += len(ids)
        self._written = Written(self._written.tokens + len(ids), sequences)

    def sync(self) -> Written:
        """Bring all that was appended onto the disk, and return how much that is."""
        # The folder is renamed at the end: a power cut must not leave a finished folder with empty files.
        for file in (self._tokens_file, self._lengths_file):
            file.flush()
            os.fsync(file.fileno())
        return self._written

    def finish(self) -> None:
        """Write the index of the documents, and the checksums of the tokens' blocks beside it."""
        self.sync()
        lengths = self._lengths()
        bounds = np.arange(0, len(lengths) + 1, 2) if self._has_prompts else None
        write_index(index_path(self._prefix), self.dtype, lengths, bounds)
        self._checksums.write(checksums_path(self._prefix))
        self.close()
        lengths_path(self._prefix).unlink()

    def fingerprint(self) -> bytes:
        """Hash all tokens, and where prompts end."""
        if not self._has_prompts:
            return self.digest.digest()
        self.sync()
        return prompts_fingerprint(self.digest.digest(), self._lengths())

    def _lengths(self) -> npt.NDArray[Any]:
        # An empty file cannot be mapped.
        if not self._written.sequences:
            return np.zeros(0, _LENGTH_DTYPE)
        return np.memmap(lengths_path(self._prefix), _LENGTH_DTYPE, mode="r")

    def close(self) -> None:
        """Close the files; what was appended stays for a later start."""
        self._tokens_file.close()
        self._lengths_file.close()

    def _count(self, stored: bytes, ids: npt.NDArray[Any]) -> None:
        self.digest.update(ids.astype(self._hashed_dtype).tobytes())
        self._checksums.append(stored)
        self.counts += np.bincount(ids, minlength=len(self.counts))


def hashed_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the type in which ids are hashed, whatever type they are stored in.

    Checkpoints know their text by that hash, since before it was stored as Megatron does.
    """
    return np.dtype("<u2" if vocab_size <= NARROW_VOCABULARY else "<i4")


def prompts_fingerprint(tokens: bytes, lengths: npt.NDArray[Any]) -> bytes:
    """Join the hash of tokens and the lengths of their prompts and completions."""
    return hashlib.sha256(tokens + lengths.astype(_LENGTH_DTYPE).tobytes()).digest()


def checksums_path(prefix: Path) -> Path:
    """Return where the checksums of a pair's tokens are; pairs of other tools have none."""
    return prefix.with_name(f"{prefix.name}.crc32")


def lengths_path(prefix: Path) -> Path:
    """Return where the lengths of documents are until the index is written."""
    return prefix.with_name(f"{prefix.name}.lengths")


def holds(prefix: Path, vocab_size: int, kept: Written) -> bool:
    """Tell whether an unfinished pair has at least what is ``kept`` of it."""
    needed = {
        tokens_path(prefix): kept.tokens * token_dtype(vocab_size).itemsize,
        lengths_path(prefix): kept.sequences * _LENGTH_DTYPE.itemsize,
    }
    return all(path.is_file() and path.stat().st_size >= size for path, size in needed.items())


def _open_at(path: Path, position: int) -> Any:
    path.touch()
    file = path.open("r+b")
    file.seek(position)
    return file
