"""Tokenises documents into a token store, in steps that a later start can go on from."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from megastable.data.indexed_writer import NOTHING_WRITTEN, IndexedWriter, Written, holds
from megastable.data.progress import note, track
from megastable.data.token_store import (
    TOKENIZER_FOLDER,
    TRAIN,
    VALIDATION,
    TokenStoreMeta,
    store_fingerprint,
    unigram_entropy_nats,
    write_meta,
)
from megastable.data.tokenizer_interface import TextTokenizer

PROGRESS_FILE = "progress.json"

# A longer document is encoded in pieces: in parallel, and without all of its ids in memory at once.
_PIECE_CHARACTERS = 1 << 20
# Enough pieces at a time to keep the cores busy.
_BATCH_CHARACTERS = 1 << 22


@dataclass(frozen=True)
class _Progress:
    """How far an unfinished store has come; all that it counts is on disk."""

    tokenizer: str
    """Hash of the tokenizer's files: only ids of the same tokenizer may be gone on from."""
    num_documents: int
    """Of all documents."""
    finished_documents: int = 0
    train: Written = NOTHING_WRITTEN
    validation: Written = NOTHING_WRITTEN

    def write(self, folder: Path) -> None:
        """Write it so that the file is whole whenever this process ends."""
        beside = folder / f"{PROGRESS_FILE}.new"
        beside.write_text(json.dumps(asdict(self)), encoding="utf-8")
        os.replace(beside, folder / PROGRESS_FILE)


def _read_progress(folder: Path) -> _Progress | None:
    try:
        record = json.loads((folder / PROGRESS_FILE).read_text(encoding="utf-8"))
        for name in (TRAIN, VALIDATION):
            record[name] = Written(**record[name])
        return _Progress(**record)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):  # nothing was finished, or by another version
        return None


def describe_progress(folder: Path) -> str:
    """Say how many documents an unfinished store in ``folder`` has; empty where it is not known."""
    progress = _read_progress(folder)
    if progress is None:
        return ""
    return f"{progress.finished_documents:,} of {progress.num_documents:,} documents are tokenised"


def write_token_store(
    folder: Path, documents: Sequence[tuple[str, bool]], tokenizer: TextTokenizer, *, show_progress: bool = False
) -> None:
    """Tokenise ``documents``, each (text, is it for validation), into ``folder``.

    Every document ends with the EOD id; those without text are left out. What an interrupted call has written into the
    folder is kept: the next one, with equal documents, goes on after the last documents that are on disk.
    """
    progress = _begin(folder, tokenizer, len(documents))
    first = progress.finished_documents
    description = f"Tokenising {len(documents):,} documents"
    if first:
        note(f"Going on after {first:,} documents that an earlier start has tokenised", show=show_progress)
    indices = track(range(first, len(documents)), description, len(documents) - first, show=show_progress)
    with ExitStack() as stack:
        train = IndexedWriter(folder / TRAIN, tokenizer.vocab_size, progress.train)
        validation = IndexedWriter(folder / VALIDATION, tokenizer.vocab_size, progress.validation)
        stack.callback(train.close)
        stack.callback(validation.close)
        for pieces in _batches((documents[index] for index in indices), tokenizer):
            _append(train, validation, pieces, tokenizer)
            first += sum(piece.ends_document for piece in pieces)
            written = (train.sync(), validation.sync())
            # In the middle of a document there is no place to go on from.
            if pieces[-1].ends_document:
                _Progress(progress.tokenizer, len(documents), first, *written).write(folder)
        meta = TokenStoreMeta(
            dtype=train.dtype.str,
            num_train_tokens=int(train.counts.sum()),
            num_validation_tokens=int(validation.counts.sum()),
            vocab_size=tokenizer.vocab_size,
            eod_id=tokenizer.eod_id,
            unigram_entropy_nats=unigram_entropy_nats(train.counts),
            fingerprint=store_fingerprint(train.digest.digest(), validation.digest.digest()),
        )
        train.finish()
        validation.finish()
    write_meta(folder, meta)
    (folder / PROGRESS_FILE).unlink()


def _begin(folder: Path, tokenizer: TextTokenizer, num_documents: int) -> _Progress:
    """Save the tokenizer, and return the progress of an earlier call with an equal one, or none."""
    fresh = _Progress(save_beside(folder, tokenizer), num_documents)
    earlier = _read_progress(folder)
    if earlier is not None and (earlier.tokenizer, earlier.num_documents) == (fresh.tokenizer, num_documents):
        kept = {TRAIN: earlier.train, VALIDATION: earlier.validation}
        if all(holds(folder / name, tokenizer.vocab_size, written) for name, written in kept.items()):
            return earlier
    fresh.write(folder)
    return fresh


def save_beside(folder: Path, tokenizer: TextTokenizer) -> str:
    """Save a tokenizer into the store in ``folder``, and return a hash of its files."""
    tokenizer_folder = folder / TOKENIZER_FOLDER
    shutil.rmtree(tokenizer_folder, ignore_errors=True)
    tokenizer_folder.mkdir()
    tokenizer.save(tokenizer_folder)
    digest = hashlib.sha256()
    for file in sorted(path for path in tokenizer_folder.rglob("*") if path.is_file()):
        digest.update(f"\0{file.name}\0".encode() + file.read_bytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class _Piece:
    text: str
    is_validation: bool
    ends_document: bool


def _append(
    train: IndexedWriter, validation: IndexedWriter, pieces: Sequence[_Piece], tokenizer: TextTokenizer
) -> None:
    """Encode pieces, and append each to the pair of its split."""
    with_text = [piece for piece in pieces if piece.text]
    encoded = tokenizer.encode_batch([piece.text for piece in with_text])
    eod = np.array([tokenizer.eod_id], dtype=np.int64)
    for writer, is_validation in ((train, False), (validation, True)):
        # An empty array makes an empty stream join as well.
        stream = [eod[:0]]
        ends = []
        num_tokens = 0
        for piece, ids in zip(with_text, encoded, strict=True):
            if piece.is_validation != is_validation:
                continue
            stream.append(np.asarray(ids, np.int64))
            num_tokens += len(ids)
            if piece.ends_document:
                stream.append(eod)
                num_tokens += 1
                ends.append(num_tokens)
        writer.append(np.concatenate(stream), np.array(ends, np.int64))


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
