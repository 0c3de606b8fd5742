"""Text to compare two models on: of the run's validation documents, where the cache of its tokens is here."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megastable.config import BlendSourceConfig, IndexedSourceConfig
from megastable.core.errors import UserError
from megastable.core.user_paths import expanded
from megastable.data.corpus import DEFAULT_CACHE_DIR
from megastable.data.indexed_source import IndexedSource
from megastable.data.token_store import META_FILE, MappedTokens, open_token_store, read_meta
from megastable.interop.saved_model import SavedModel

SAMPLES = 2
MOST_TOKENS = 512
"""Of a sample: enough for positions to differ, little enough to take seconds."""


@dataclass(frozen=True)
class HeldOutText:
    """Token ids (samples, tokens), and what they are."""

    token_ids: Tensor
    name: str


def held_out_text(saved: SavedModel) -> HeldOutText:
    """Take the first validation tokens of the run; random ones where the run's tokens are not here."""
    length = min(saved.model.seq_length, MOST_TOKENS)
    tokens = _validation_tokens(saved, SAMPLES * length)
    if tokens is not None:
        return HeldOutText(tokens.view(SAMPLES, length), f"{SAMPLES * length:,} tokens of the validation documents")
    generator = torch.Generator().manual_seed(0)
    random = torch.randint(saved.model.vocab_size, (SAMPLES, length), generator=generator)
    why = "the run's validation documents are not here"
    if isinstance(saved.run.megastable.data.source, BlendSourceConfig):
        why = "of a blend of sources, no validation documents are looked up"
    return HeldOutText(random, f"{SAMPLES * length:,} random tokens ({why})")


def _validation_tokens(saved: SavedModel, count: int) -> Tensor | None:
    folder = cached_corpus(saved)
    if folder is None:
        return None
    source = saved.run.megastable.data.source
    try:
        if isinstance(source, IndexedSourceConfig):
            validation = _validation_of_pair(source, saved.run.megastable.data.validation_fraction, folder)
        else:
            _, _, validation = open_token_store(folder)
    except (UserError, OSError, ValueError, TypeError):  # damaged or missing files are the business of the run
        return None
    if validation is None or len(validation.tokens) < count:
        return None
    tokens = validation.tokens[:count].astype("int64")
    # A pair may have changed since; an id without a row would end both models.
    if tokens.min() < 0 or tokens.max() >= saved.model.vocab_size:
        return None
    return torch.tensor(tokens)


def _validation_of_pair(source: IndexedSourceConfig, fraction: float, folder: Path) -> MappedTokens | None:
    """Map the validation tokens of a pair; None where it has changed since its record in ``folder`` was written."""
    train, validation = IndexedSource(source).split(fraction)
    record = folder / META_FILE
    meta = read_meta(record)
    changed = max(part.path.stat().st_mtime_ns for part in (train, validation))
    is_newer = changed > record.stat().st_mtime_ns
    found = (len(train.tokens), len(validation.tokens))
    if is_newer or found != (meta.num_train_tokens, meta.num_validation_tokens):
        return None
    return validation


def cached_corpus(saved: SavedModel) -> Path | None:
    """Return the folder with the tokens that the checkpoint was trained on; None where it is not on this machine."""
    cache_dir = expanded(saved.run.megastable.data.cache_dir or DEFAULT_CACHE_DIR)
    for meta in sorted((cache_dir / "tokens").glob(f"*/{META_FILE}")):
        if _fingerprint_in(meta) == saved.manifest.corpus_fingerprint:
            return meta.parent
    return None


def _fingerprint_in(meta: Path) -> str | None:
    try:
        values = json.loads(meta.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return values.get("fingerprint") if isinstance(values, dict) else None
