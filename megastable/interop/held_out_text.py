"""Text to compare two models on: of the run's validation documents, where the cache of its tokens is here."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megastable.core.errors import UserError
from megastable.core.user_paths import expanded
from megastable.data.corpus import DEFAULT_CACHE_DIR
from megastable.data.token_store import META_FILE, open_token_store
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
    return HeldOutText(random, f"{SAMPLES * length:,} random tokens (the run's validation documents are not here)")


def _validation_tokens(saved: SavedModel, count: int) -> Tensor | None:
    folder = cached_corpus(saved)
    if folder is None:
        return None
    try:
        _, _, validation = open_token_store(folder)
    except UserError:  # a damaged cache is the business of the run that reads it
        return None
    if len(validation.tokens) < count:
        return None
    return torch.tensor(validation.tokens[:count].astype("int64"))


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
