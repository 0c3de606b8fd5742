"""From the ``data`` section of a run file to samples: tokenised once, cached, mapped into memory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from megastable.config import BlendSourceConfig, DataConfig, ModelConfig
from megastable.core.errors import UserError
from megastable.core.user_paths import expanded
from megastable.data.cache_folder import build_once
from megastable.data.corpora import BlendedCorpus, Corpus
from megastable.data.dataset import TokenDataset
from megastable.data.indexed_source import IndexedSource
from megastable.data.progress import note
from megastable.data.prompts import Document, text_of
from megastable.data.sample_order import hash64, validation_documents
from megastable.data.sources import DocumentSource, Source, has_prompts, naming_part, open_source, reads_in_order
from megastable.data.text_tokenizers import check_fits_model, make_tokenizer, tokenizer_identity
from megastable.data.token_store import (
    FORMAT_VERSION,
    META_FILE,
    TOKENIZER_FOLDER,
    MappedTokens,
    damaged_store,
    open_token_store,
    read_meta,
)
from megastable.data.token_writer import describe_progress, write_token_store

DEFAULT_CACHE_DIR = "~/.cache/megastable"
BPE_TRAINING_CHARACTERS = 32_000_000
"""The merges of a BPE settle long before this much text, and training on it takes about 15 s on one core."""
CACHE_KEY_DIGITS = 32
"""Hexadecimal digits of a hash: 128 bits, so that no two corpora ever share a folder."""


def prepare_corpus(
    data: DataConfig, model: ModelConfig, *, show_progress: bool, num_workers: int = 0
) -> Corpus | BlendedCorpus:
    """Tokenise the documents that ``data`` names, or find them in the cache.

    Any number of processes may call this at once: one of them builds, the others wait and map the same files.

    Args:
        num_workers: processes that encode; 0 encodes here, on the threads of the tokenizer.

    Raises:
        UserError: the documents, the tokenizer or the cache cannot be read, or do not fit the model.
    """
    if not isinstance(data.source, BlendSourceConfig):
        return _prepare_one(data, model, show_progress, num_workers)
    corpora = []
    for index, part in enumerate(data.source.sources):
        with naming_part(index):
            of_part = data.model_copy(update={"source": part.source})
            corpora.append(_prepare_one(of_part, model, show_progress, num_workers))
    return BlendedCorpus.of(data.source, corpora)


def _prepare_one(data: DataConfig, model: ModelConfig, show_progress: bool, num_workers: int) -> Corpus:
    """Prepare the corpus of a source that is no blend."""
    source = open_source(data.source)
    note_remarks(source, show=show_progress)
    cache_dir = expanded(data.cache_dir or DEFAULT_CACHE_DIR)
    folder = cache_dir / "tokens" / _cache_key(data, model, source)

    def build(unfinished: Path) -> None:
        if isinstance(source, IndexedSource):
            tokenizer = make_tokenizer(data.tokenizer, model, ())
            source.look_through(unfinished, tokenizer, data.validation_fraction, show_progress=show_progress)
        else:
            _build(unfinished, data, model, cast(DocumentSource, source), show_progress, num_workers)

    build_once(folder, build, describe_progress, show_progress=show_progress)
    if isinstance(source, IndexedSource):
        try:
            meta = read_meta(folder / META_FILE)
        except (OSError, ValueError, TypeError) as error:
            raise damaged_store(folder, error) from error
        if data.resets_at_documents:
            source.check_ends(meta.eod_id)
        train, validation = source.split(data.validation_fraction)
    else:
        meta, train, validation = open_token_store(folder)
    # A corpus from the cache may have been tokenised for a larger model.
    check_fits_model(meta.vocab_size, meta.eod_id, model)
    if len(train.tokens) <= model.seq_length:
        raise UserError(
            f"megastable.data.source: {source.name} has {len(train.tokens):,} training tokens, less than one "
            f"sample of megastable.model.seq_length + 1 = {model.seq_length + 1:,}; add text or shorten the samples"
        )

    def dataset_of(file: MappedTokens) -> TokenDataset:
        return TokenDataset(
            file.tokens,
            model.seq_length,
            meta.eod_id,
            meta.vocab_size,
            str(file.path),
            file.checksums,
            file.first_token,
            file.remedy,
            file.prompts,
        )

    return Corpus(
        train=dataset_of(train),
        validation=dataset_of(validation),
        vocab_size=meta.vocab_size,
        eod_id=meta.eod_id,
        unigram_entropy_nats=meta.unigram_entropy_nats,
        fingerprint=meta.fingerprint,
        tokenizer_path=folder / TOKENIZER_FOLDER,
    )


def note_remarks(source: Source, *, show: bool) -> None:
    """Say what a source has left out."""
    for remark in source.remarks():
        note(f"{source.name}: {remark}", show=show)


def _cache_key(data: DataConfig, model: ModelConfig, source: Source) -> str:
    """Hash everything that decides the tokens; the length of samples does not, they are cut when read.

    The key of a corpus may change with the format of a store alone: users have corpora that took hours to tokenise.
    """
    parts = {
        "format_version": FORMAT_VERSION,
        "source": data.source.model_dump(mode="json"),
        "documents": source.fingerprint(),
        "tokenizer": tokenizer_identity(data.tokenizer, model),
        "validation_fraction": data.validation_fraction,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:CACHE_KEY_DIGITS]


def _build(
    folder: Path,
    data: DataConfig,
    model: ModelConfig,
    source: DocumentSource,
    show_progress: bool,
    num_workers: int,
) -> None:
    """Make the tokenizer and tokenise every document into ``folder``."""
    is_validation = validation_documents(len(source), data.validation_fraction)  # (documents,)
    # The tokenizer learns from the training documents alone, or the validation loss would know its own text.
    note(f"Preparing the {data.tokenizer.type} tokenizer ...", show=show_progress)
    in_order = reads_in_order(data.source)
    training_texts = texts_to_learn_from(source, np.flatnonzero(~is_validation), in_order=in_order)
    tokenizer = make_tokenizer(data.tokenizer, model, training_texts)
    meta = write_token_store(
        folder,
        SplitDocuments(source, is_validation),
        tokenizer,
        show_progress=show_progress,
        num_workers=num_workers,
        has_prompts=has_prompts(data.source),
    )
    if meta.num_empty_documents:
        note(f"{source.name}: left out {meta.num_empty_documents:,} documents without text", show=show_progress)


class SplitDocuments(Sequence[tuple[Document, bool]]):
    """The documents of a source, each with whether it is for validation, read when they are asked for."""

    def __init__(self, source: DocumentSource, is_validation: npt.NDArray[np.bool_]) -> None:
        self._source = source
        self._is_validation = is_validation

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: Any) -> Any:
        return read_document(self._source, index), bool(self._is_validation[index])


def read_document(source: DocumentSource, index: int) -> Document:
    """Read a document that every tokenizer can take.

    Raises:
        UserError: it has half of a surrogate pair, which UTF-8 cannot write; rows of a data set may.
    """
    document = source[index]
    text = text_of(document)
    try:
        # An ASCII text, which Python knows without a look, needs no second copy in memory.
        if not text.isascii():
            text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"megastable.data.source: document {index:,} of {source.name} is no Unicode text: it has half of a "
            f"surrogate pair (character {error.start:,}); mend or remove it"
        ) from error
    return document


def texts_to_learn_from(source: DocumentSource, documents: npt.NDArray[np.int64], *, in_order: bool) -> Iterator[str]:
    """Read ``documents`` until there is enough to learn from, in an order that mixes all parts of the source.

    Args:
        in_order: take the first ones instead, because going back in the source takes long.
    """
    characters = 0
    # By their hash: the first documents of a sorted folder may all be in one language.
    if not in_order:
        documents = documents[np.argsort(hash64(documents))]
    for index in documents:
        if characters >= BPE_TRAINING_CHARACTERS:
            return
        # A single document may be larger than the whole budget.
        text = text_of(read_document(source, int(index)))[: BPE_TRAINING_CHARACTERS - characters]
        characters += len(text)
        yield text
