"""Tokenises documents into a token store, in steps that a later start can go on from."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from megastable.data.encoding import Ids, encoded
from megastable.data.indexed_writer import NOTHING_WRITTEN, IndexedWriter, Written, holds
from megastable.data.progress import note, tokenising
from megastable.data.prompts import Document, Prompted, is_empty
from megastable.data.token_store import (
    META_FILE,
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
# Enough pieces at a time to keep the cores busy, and not so many that processes wait for the one with the last.
_BATCH_CHARACTERS = 1 << 20
# Between two places to go on from: a slow disk takes a second to make sure that it has everything.
_SYNC_SECONDS = 2.0


@dataclass(frozen=True)
class _Progress:
    """How far an unfinished store has come; all that it counts is on disk."""

    tokenizer: str
    """Hash of the tokenizer's files: only ids of the same tokenizer may be gone on from."""
    num_documents: int
    """Of all documents."""
    finished_documents: int = 0
    empty_documents: int = 0
    """Of those finished, without text."""
    train: Written = NOTHING_WRITTEN
    validation: Written = NOTHING_WRITTEN

    def after(self, batch: _PieceBatch) -> _Progress:
        """Return how far the store is with one batch more, which is not yet said to be on disk."""
        return replace(
            self,
            finished_documents=self.finished_documents + batch.num_documents,
            empty_documents=self.empty_documents + sum(piece.is_empty_document for piece in batch.pieces),
        )

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


def finished_documents(folder: Path) -> int:
    """Count the documents that an unfinished store has."""
    progress = _read_progress(folder)
    return 0 if progress is None else progress.finished_documents


def describe_progress(folder: Path) -> str:
    """Say how many documents an unfinished store in ``folder`` has; empty where it has none, or that is not known."""
    progress = _read_progress(folder)
    if progress is None or progress.finished_documents == 0:
        return ""
    return f"{progress.finished_documents:,} of {progress.num_documents:,} documents are tokenised"


def write_token_store(
    folder: Path,
    documents: Sequence[tuple[Document, bool]],
    tokenizer: TextTokenizer,
    *,
    show_progress: bool = False,
    num_workers: int = 0,
    has_prompts: bool = False,
) -> TokenStoreMeta:
    """Tokenise ``documents``, each (text, is it for validation), into ``folder``.

    Every document ends with the EOD id; those without text are left out. What an interrupted call has written into the
    folder is kept: the next one, with equal documents, goes on after the last documents that are on disk. The files are
    the same for any number of workers.

    Args:
        num_workers: processes that encode; 0 encodes here, on the threads of the tokenizer.
        has_prompts: whether the documents are prompts with completions.
    """
    progress = _begin(folder, tokenizer, len(documents))
    first = progress.finished_documents
    if first:
        note(f"Going on after {first:,} documents that an earlier start has tokenised", show=show_progress)
    texts = (documents[index] for index in range(first, len(documents)))
    with ExitStack() as stack:
        train = IndexedWriter(folder / TRAIN, tokenizer.vocab_size, progress.train, has_prompts=has_prompts)
        validation = IndexedWriter(
            folder / VALIDATION, tokenizer.vocab_size, progress.validation, has_prompts=has_prompts
        )
        stack.callback(train.close)
        stack.callback(validation.close)
        # The workers first: they must not be forked from a process that draws a bar.
        batches = stack.enter_context(encoded(_batches(texts, tokenizer), tokenizer, num_workers))
        description = f"Tokenising {len(documents):,} documents"
        bar = stack.enter_context(tokenising(len(documents) - first, description, show=show_progress))
        synced = time.monotonic()
        for batch, ids in batches:
            num_tokens = _append(train, validation, batch, ids, tokenizer.eod_id)
            progress = progress.after(batch)
            bar.advance(batch.num_documents, num_tokens)
            # In the middle of a document there is no place to go on from.
            if batch.pieces[-1].ends_document and time.monotonic() - synced >= _SYNC_SECONDS:
                progress = replace(progress, train=train.sync(), validation=validation.sync())
                progress.write(folder)
                synced = time.monotonic()
        meta = TokenStoreMeta(
            dtype=train.dtype.str,
            num_documents=len(documents),
            num_empty_documents=progress.empty_documents,
            num_train_tokens=int(train.counts.sum()),
            num_validation_tokens=int(validation.counts.sum()),
            vocab_size=tokenizer.vocab_size,
            eod_id=tokenizer.eod_id,
            unigram_entropy_nats=unigram_entropy_nats(train.counts),
            fingerprint=store_fingerprint(train.fingerprint(), validation.fingerprint()),
            has_prompts=has_prompts,
        )
        train.finish()
        validation.finish()
    write_meta(folder / META_FILE, meta)
    (folder / PROGRESS_FILE).unlink()
    return meta


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
    ends_prompt: bool = False
    is_empty_document: bool = False


@dataclass(frozen=True)
class _PieceBatch:
    pieces: Sequence[_Piece]

    @property
    def texts(self) -> list[str]:
        """Return the texts that there is something to encode of."""
        return [piece.text for piece in self.pieces if piece.text]

    @property
    def num_documents(self) -> int:
        """Count the documents that end here."""
        return sum(piece.ends_document for piece in self.pieces)


def _append(train: IndexedWriter, validation: IndexedWriter, batch: _PieceBatch, all_ids: Ids, eod_id: int) -> int:
    """Append the ids of each piece to the pair of its split; returns how many there are."""
    eod = np.array([eod_id], dtype=np.int64)
    total = 0
    for writer, is_validation in ((train, False), (validation, True)):
        # An empty array makes an empty stream join as well.
        stream = [eod[:0]]
        ends = []
        num_tokens = 0
        remaining = iter(all_ids)
        for piece in batch.pieces:
            ids = next(remaining) if piece.text else eod[:0]
            if piece.is_validation != is_validation or piece.is_empty_document:
                continue
            stream.append(ids)
            num_tokens += len(ids)
            if piece.ends_document:
                stream.append(eod)
                num_tokens += 1
            if piece.ends_document or piece.ends_prompt:
                ends.append(num_tokens)
        writer.append(np.concatenate(stream), np.array(ends, np.int64))
        total += num_tokens
    return total


def _batches(documents: Iterable[tuple[Document, bool]], tokenizer: TextTokenizer) -> Iterator[_PieceBatch]:
    """Cut documents into pieces, in order, and yield as many at a time as keep the cores busy.

    A document without text is a piece without text, so that finished documents can be counted.
    """
    batch: list[_Piece] = []
    characters = 0
    for document, is_validation in documents:
        for piece in _pieces(document, is_validation, tokenizer):
            batch.append(piece)
            # At least one, so that documents without text do not gather for ever.
            characters += max(1, len(piece.text))
            if characters >= _BATCH_CHARACTERS:
                yield _PieceBatch(batch)
                batch = []
                characters = 0
    if batch:
        yield _PieceBatch(batch)


def _pieces(document: Document, is_validation: bool, tokenizer: TextTokenizer) -> Iterator[_Piece]:
    """Cut a document into pieces; the prompt of one has pieces of its own."""
    if is_empty(document):
        yield _Piece("", is_validation, ends_document=True, is_empty_document=True)
        return
    if isinstance(document, Prompted):
        *most, last = _cut(document.prompt, tokenizer)
        yield from (_Piece(text, is_validation, ends_document=False) for text in most)
        yield _Piece(last, is_validation, ends_document=False, ends_prompt=True)
        document = document.completion
    *most, last = _cut(document, tokenizer)
    yield from (_Piece(text, is_validation, ends_document=False) for text in most)
    yield _Piece(last, is_validation, ends_document=True)


def _cut(text: str, tokenizer: TextTokenizer) -> list[str]:
    return list(tokenizer.pieces(text, _PIECE_CHARACTERS)) if len(text) > _PIECE_CHARACTERS else [text]
