"""Tokenises documents into token files, in steps that a later start can go on from."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megastable.data.block_checksums import ChecksumWriter
from megastable.data.progress import note, track
from megastable.data.token_store import (
    META_FILE,
    TOKENIZER_FOLDER,
    TRAIN_FILE,
    VALIDATION_FILE,
    TokenStoreMeta,
    checksums_path,
    store_fingerprint,
    unigram_entropy_nats,
)
from megastable.data.tokenizer_interface import TextTokenizer

PROGRESS_FILE = "progress.json"

# A longer document is encoded in pieces: in parallel, and without all of its ids in memory at once.
_PIECE_CHARACTERS = 1 << 20
# Enough pieces at a time to keep the cores busy.
_BATCH_CHARACTERS = 1 << 22
_READ_BYTES = 1 << 24


@dataclass(frozen=True)
class _Progress:
    """How far an unfinished store has come; all that it counts is on disk."""

    tokenizer: str
    """Hash of the tokenizer's files: only ids of the same tokenizer may be gone on from."""
    num_documents: int
    """Of all documents."""
    finished_documents: int = 0
    train_bytes: int = 0
    validation_bytes: int = 0

    def write(self, folder: Path) -> None:
        """Write it so that the file is whole whenever this process ends."""
        beside = folder / f"{PROGRESS_FILE}.new"
        beside.write_text(json.dumps(asdict(self)), encoding="utf-8")
        os.replace(beside, folder / PROGRESS_FILE)


def _read_progress(folder: Path) -> _Progress | None:
    try:
        return _Progress(**json.loads((folder / PROGRESS_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):  # nothing was finished, or by another version
        return None


def describe_progress(folder: Path) -> str:
    """Say how many documents an unfinished store in ``folder`` has; empty where it is not known."""
    progress = _read_progress(folder)
    if progress is None:
        return ""
    return f"{progress.finished_documents:,} of {progress.num_documents:,} documents are tokenised"


class _TokenFile:
    """Appends tokens to a file, counts them by id, hashes them and takes the checksums of their blocks."""

    def __init__(self, path: Path, dtype: npt.DTypeLike, vocab_size: int, kept_bytes: int) -> None:
        """Open the file and drop all but its first ``kept_bytes``."""
        path.touch()
        self._file = path.open("r+b")
        self._dtype = dtype
        self.counts = np.zeros(vocab_size, dtype=np.int64)
        self.digest = hashlib.sha256()
        self.checksums = ChecksumWriter()
        for start in range(0, kept_bytes, _READ_BYTES):
            stored = self._file.read(min(_READ_BYTES, kept_bytes - start))
            self._count(stored, np.frombuffer(stored, dtype))
        self._file.truncate(kept_bytes)
        self._file.seek(kept_bytes)

    def append(self, ids: npt.NDArray[Any]) -> None:
        """Write the token ids (any number, shape [n]) at the end of the file."""
        stored = ids.astype(self._dtype).tobytes()
        self._file.write(stored)
        self._count(stored, ids)

    def _count(self, stored: bytes, ids: npt.NDArray[Any]) -> None:
        self.digest.update(stored)
        self.checksums.append(stored)
        self.counts += np.bincount(ids, minlength=len(self.counts))

    def sync(self) -> int:
        """Bring all tokens onto the disk, and return the size of the file."""
        # The folder is renamed at the end: a power cut must not leave a finished folder with empty files.
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._file.tell()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def write_token_store(
    folder: Path, documents: Sequence[tuple[str, bool]], tokenizer: TextTokenizer, *, show_progress: bool = False
) -> None:
    """Tokenise ``documents``, each (text, is it for validation), into ``folder``.

    Every document ends with the EOD id; those without text are left out. What an interrupted call has written into the
    folder is kept: the next one, with equal documents, goes on after the last documents that are on disk.
    """
    # Little-endian wherever it is written, so that a cache can be copied between machines.
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32).newbyteorder("<")
    progress = _begin(folder, tokenizer, len(documents))
    kept = (progress.train_bytes, progress.validation_bytes)
    first = progress.finished_documents
    description = f"Tokenising {len(documents):,} documents"
    if first:
        note(f"Going on after {first:,} documents that an earlier start has tokenised", show=show_progress)
    indices = track(range(first, len(documents)), description, len(documents) - first, show=show_progress)
    with ExitStack() as stack:
        train, validation = (
            _TokenFile(folder / name, dtype, tokenizer.vocab_size, size)
            for name, size in zip((TRAIN_FILE, VALIDATION_FILE), kept, strict=True)
        )
        stack.callback(train.close)
        stack.callback(validation.close)
        for pieces in _batches((documents[index] for index in indices), tokenizer):
            _append(train, validation, pieces, tokenizer)
            first += sum(piece.ends_document for piece in pieces)
            sizes = (train.sync(), validation.sync())
            # In the middle of a document there is no place to go on from.
            if pieces[-1].ends_document:
                _Progress(progress.tokenizer, len(documents), first, *sizes).write(folder)
        meta = TokenStoreMeta(
            dtype=dtype.str,
            num_train_tokens=int(train.counts.sum()),
            num_validation_tokens=int(validation.counts.sum()),
            vocab_size=tokenizer.vocab_size,
            eod_id=tokenizer.eod_id,
            unigram_entropy_nats=unigram_entropy_nats(train.counts),
            fingerprint=store_fingerprint(train.digest.digest(), validation.digest.digest()),
        )
        train.checksums.write(checksums_path(folder / TRAIN_FILE))
        validation.checksums.write(checksums_path(folder / VALIDATION_FILE))
    (folder / META_FILE).write_text(json.dumps(asdict(meta), indent=2) + "\n", encoding="utf-8")
    (folder / PROGRESS_FILE).unlink()


def _begin(folder: Path, tokenizer: TextTokenizer, num_documents: int) -> _Progress:
    """Save the tokenizer, and return the progress of an earlier call with an equal one, or none."""
    tokenizer_folder = folder / TOKENIZER_FOLDER
    shutil.rmtree(tokenizer_folder, ignore_errors=True)
    tokenizer_folder.mkdir()
    tokenizer.save(tokenizer_folder)
    digest = hashlib.sha256()
    for file in sorted(path for path in tokenizer_folder.rglob("*") if path.is_file()):
        digest.update(f"\0{file.name}\0".encode() + file.read_bytes())
    fresh = _Progress(digest.hexdigest(), num_documents)
    earlier = _read_progress(folder)
    if earlier is not None and (earlier.tokenizer, earlier.num_documents) == (fresh.tokenizer, num_documents):
        kept = {TRAIN_FILE: earlier.train_bytes, VALIDATION_FILE: earlier.validation_bytes}
        if all((folder / name).is_file() and (folder / name).stat().st_size >= size for name, size in kept.items()):
            return earlier
    fresh.write(folder)
    return fresh


@dataclass(frozen=True)
class _Piece:
    text: str
    is_validation: bool
    ends_document: bool


def _append(train: _TokenFile, validation: _TokenFile, pieces: Sequence[_Piece], tokenizer: TextTokenizer) -> None:
    """Encode pieces, and append each to the file of its split."""
    eod = np.array([tokenizer.eod_id], dtype=np.int64)
    # What goes to the training and to the validation file; an empty array makes an empty one join as well.
    streams: tuple[list[Any], list[Any]] = ([eod[:0]], [eod[:0]])
    with_text = [piece for piece in pieces if piece.text]
    encoded = tokenizer.encode_batch([piece.text for piece in with_text])
    for piece, ids in zip(with_text, encoded, strict=True):
        stream = streams[1 if piece.is_validation else 0]
        stream.append(np.asarray(ids, np.int64))
        if piece.ends_document:
            stream.append(eod)
    for file, stream in zip((train, validation), streams, strict=True):
        file.append(np.concatenate(stream))


def _batches(documents: Iterable[tuple[str, bool]], tokenizer: TextTokenizer) -> Iterator[list[_Piece]]:
    """Cut documents into pieces, in order, and yield as many at a time as keep the cores busy.

    A document without text is a piece without text, so that finished documents can be counted.
    """
    batch: list[_Piece] = []
    characters = 0
    for text, is_validation in documents:
        pieces = [text]
        if len(text) > _PIECE_CHARACTERS:
            pieces = list(tokenizer.pieces(text, _PIECE_CHARACTERS))
        for index, piece in enumerate(pieces, start=1):
            batch.append(_Piece(piece, is_validation, ends_document=index == len(pieces)))
            characters += len(piece)
            if characters >= _BATCH_CHARACTERS:
                yield batch
                batch = []
                characters = 0
    if batch:
        yield batch
