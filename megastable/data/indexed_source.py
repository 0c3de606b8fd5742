"""Tokens that are there already, in Megatron's indexed format: opened, looked through once, and never copied."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megastable.config import IndexedSourceConfig
from megastable.core.errors import UserError
from megastable.core.user_paths import expanded
from megastable.data.beside import checksums_beside, record_beside, same_vocabulary, tokenizer_beside
from megastable.data.indexed_format import IndexedTokens, check_ids, index_path, open_indexed, tokens_path
from megastable.data.indexed_writer import hashed_dtype, prompts_fingerprint
from megastable.data.progress import note, track
from megastable.data.prompts import PromptSpans
from megastable.data.sample_order import num_validation_documents
from megastable.data.token_store import (
    META_FILE,
    TOKENIZER_FOLDER,
    MappedTokens,
    TokenStoreMeta,
    store_fingerprint,
    unigram_entropy_nats,
    write_meta,
)
from megastable.data.token_writer import save_beside
from megastable.data.tokenizer_interface import TextTokenizer

RESTORE = "copy the pair anew or build it again, and delete a .crc32 file that another pair has left beside it"
_TOKENS_AT_ONCE = 1 << 22
_ENDS_AT_ONCE = 1 << 12


class IndexedSource:
    """A pair of files to train on, and what of it, or which other pair, is for validation."""

    def __init__(self, spec: IndexedSourceConfig) -> None:
        """Map the pairs into memory.

        Raises:
            UserError: a file cannot be read, or does not fit the other one of its pair.
        """
        self.name = spec.path
        self._train = _open(spec.path, "path")
        self._validation = None
        if spec.validation_path is not None:
            self._validation = _open(spec.validation_path, "validation_path")

    def __len__(self) -> int:
        return sum(pair.num_documents for pair in self._pairs)

    @property
    def num_tokens(self) -> int:
        """Count the tokens that there are to train on, and those of the same pair that are kept for validation."""
        return len(self._train.tokens)

    def num_bytes(self) -> None:
        """Return None: tokens are counted, not the text that they were made of."""

    def remarks(self) -> Sequence[str]:
        """Return nothing: every document is read."""
        return ()

    def fingerprint(self) -> str:
        """Hash the size and time of change of every file, and what tells the tokenizer that made them."""
        digest = hashlib.sha256()
        for pair in self._pairs:
            for path in (tokens_path(pair.prefix), index_path(pair.prefix)):
                status = path.stat()
                digest.update(f"{status.st_size}\0{status.st_mtime_ns}\n".encode())
            record = record_beside(pair.prefix)
            if record is not None:
                digest.update(f"{record.vocab_size} {record.eod_id}\n".encode())
            folder = tokenizer_beside(pair.prefix)
            if folder is not None and (folder / "tokenizer.json").is_file():
                digest.update((folder / "tokenizer.json").read_bytes())
        return digest.hexdigest()

    def split(self, validation_fraction: float) -> tuple[MappedTokens, MappedTokens]:
        """Return the tokens to train on, and those for validation.

        Where no pair of its own is for validation, the last documents are: a sample is a stretch of the file.
        """
        if self._validation is not None:
            return _tokens_of(self._train), _tokens_of(self._validation)
        first = self._train.num_documents - num_validation_documents(self._train.num_documents, validation_fraction)
        cut = len(self._train.tokens)
        if first < self._train.num_documents:
            cut = self._train.document_bounds(first)[0]
        return _tokens_of(self._train, slice(0, cut)), _tokens_of(self._train, slice(cut, None))

    def look_through(
        self, folder: Path, tokenizer: TextTokenizer, validation_fraction: float, *, show_progress: bool
    ) -> None:
        """Read all tokens once, and write what a run has to know of them, and the tokenizer, into ``folder``.

        Raises:
            UserError: an id is outside the tokenizer's vocabulary, or another tokenizer made the pair.
        """
        save_beside(folder, tokenizer)
        for pair in self._pairs:
            _check_tokenizer(pair, tokenizer, folder / TOKENIZER_FOLDER)
            self._note_ends(pair, tokenizer.eod_id, show_progress)
        train, validation = self.split(validation_fraction)
        counts = np.zeros(tokenizer.vocab_size, np.int64)
        digests = []
        for pair, tokens in ((self._train, train), (self._validation or self._train, validation)):
            digest = hashlib.sha256()
            description = f"Looking through {len(tokens.tokens):,} tokens of {tokens.path}"
            starts = range(0, len(tokens.tokens), _TOKENS_AT_ONCE)
            for start in track(starts, description, len(starts), show=show_progress):
                stop = min(start + _TOKENS_AT_ONCE, len(tokens.tokens))
                check_ids(pair, tokenizer.vocab_size, tokens.first_token + start, tokens.first_token + stop)
                part = np.asarray(tokens.tokens[start:stop])
                digest.update(part.astype(hashed_dtype(tokenizer.vocab_size)).tobytes())
                if tokens is train:
                    counts += np.bincount(part, minlength=len(counts))
            digests.append(digest.digest())
            if tokens.prompts is not None:
                digests[-1] = prompts_fingerprint(digests[-1], _lengths_of(pair, tokens))
        meta = TokenStoreMeta(
            dtype=self._train.tokens.dtype.str,
            num_documents=len(self),
            num_empty_documents=0,
            num_train_tokens=len(train.tokens),
            num_validation_tokens=len(validation.tokens),
            vocab_size=tokenizer.vocab_size,
            eod_id=tokenizer.eod_id,
            unigram_entropy_nats=unigram_entropy_nats(counts),
            fingerprint=store_fingerprint(*digests),
            has_prompts=train.prompts is not None,
        )
        write_meta(folder / META_FILE, meta)

    def check_ends(self, eod_id: int) -> None:
        """Refuse a pair in which no document ends as this run ends documents, though it is to begin anew at each.

        Raises:
            UserError: naming the pair.
        """
        for pair in self._pairs:
            # As a rule the first few documents end with it: then no more are read.
            if not any(bool((last == eod_id).any()) for last in _last_tokens(pair, _ENDS_AT_ONCE)):
                raise UserError(
                    f'megastable.data.packing: "reset" begins anew after the end-of-document id {eod_id}, with which '
                    f'no document of {tokens_path(pair.prefix)} ends; legal is "continuous", or the tokenizer that '
                    "made the pair in megastable.data.tokenizer"
                )

    @property
    def _pairs(self) -> tuple[IndexedTokens, ...]:
        return (self._train,) if self._validation is None else (self._train, self._validation)

    def _note_ends(self, pair: IndexedTokens, eod_id: int, show_progress: bool) -> None:
        """Say how many documents do not end as the tokenizer ends them: then another one may have made them."""
        others = sum(int(np.count_nonzero(last != eod_id)) for last in _last_tokens(pair, _TOKENS_AT_ONCE))
        if others:
            note(
                f"{tokens_path(pair.prefix)}: {others:,} of {pair.num_documents:,} documents do not end with the "
                f"tokenizer's end-of-document id {eod_id}; were they made with this tokenizer?",
                show=show_progress,
            )


def _check_tokenizer(pair: IndexedTokens, tokenizer: TextTokenizer, saved: Path) -> None:
    """Refuse a tokenizer that is not the one that made a pair, as far as what lies beside the pair tells.

    Args:
        saved: the folder that the tokenizer is saved in.
    """
    record = record_beside(pair.prefix)
    beside = tokenizer_beside(pair.prefix)
    differs = ""
    if record is not None and (record.vocab_size, record.eod_id) != (tokenizer.vocab_size, tokenizer.eod_id):
        differs = (
            f"{record.vocab_size:,} tokens and the end-of-document id {record.eod_id} instead of "
            f"{tokenizer.vocab_size:,} and {tokenizer.eod_id}"
        )
    elif beside is not None and same_vocabulary(beside, saved) is False:
        differs = "other tokens or merges"
    if differs:
        legal = "the tokenizer that made it" if beside is None else f'{{"type": "transformers", "path": "{beside}"}}'
        raise UserError(
            f"megastable.data.tokenizer: {pair.prefix} was made with another tokenizer ({differs}), so that its ids "
            f"would mean other text; legal is {legal}"
        )


def _last_tokens(pair: IndexedTokens, at_once: int) -> Iterator[npt.NDArray[Any]]:
    """Yield the last tokens of documents, ``at_once`` at a time; of an empty document that of the one before it."""
    # Where a sequence ends, the next one begins.
    for start in range(1, pair.num_documents + 1, at_once):
        next_sequences = pair.document_indices[start : min(start + at_once, pair.num_documents + 1)]
        inside = next_sequences[next_sequences < len(pair.sequence_pointers)]
        ends = pair.sequence_pointers[inside] // pair.tokens.itemsize
        ends = np.concatenate([ends, np.full(len(next_sequences) - len(inside), len(pair.tokens))])
        yield pair.tokens[ends[ends > 0] - 1]


def _open(named: str, key: str) -> IndexedTokens:
    try:
        opened = open_indexed(expanded(named))
    except UserError as error:
        raise UserError(f"megastable.data.source.{key}: {error}") from error
    if len(opened.tokens) == 0:
        raise UserError(f"megastable.data.source.{key}: {tokens_path(opened.prefix)} has no tokens")
    return opened


def _tokens_of(pair: IndexedTokens, part: slice = slice(None)) -> MappedTokens:
    """Take a part of a pair's tokens, with the checksums of the file where it has some."""
    checksums = checksums_beside(pair)
    record = record_beside(pair.prefix)
    prompts = PromptSpans(pair) if record is not None and record.has_prompts else None
    return MappedTokens(tokens_path(pair.prefix), pair.tokens[part], checksums, part.start or 0, RESTORE, prompts)


def _lengths_of(pair: IndexedTokens, tokens: MappedTokens) -> npt.NDArray[Any]:
    """Return the lengths of the sequences that a split of a pair has."""
    starts = np.asarray(pair.sequence_pointers) // pair.tokens.itemsize
    first = int(np.searchsorted(starts, tokens.first_token))
    stop = int(np.searchsorted(starts, tokens.first_token + len(tokens.tokens)))
    return pair.sequence_lengths[first:stop]
