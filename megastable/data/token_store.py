"""What a tokenised corpus looks like on disk, two pairs of Megatron's indexed format, and mapping it into memory."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megastable.core.errors import UserError
from megastable.data.block_checksums import BlockChecksums, TokenArray, describe_damage
from megastable.data.dataset import REBUILD
from megastable.data.indexed_format import open_indexed, tokens_path
from megastable.data.indexed_writer import checksums_path
from megastable.data.prompts import PromptSpans

FORMAT_VERSION = 3
"""Stores of version 2 have no index of their documents. Nothing looks for earlier stores: their corpora are built anew,
with the same tokens."""
TRAIN, VALIDATION = "train", "validation"
META_FILE, TOKENIZER_FOLDER = "meta.json", "tokenizer"

VERIFIED_BYTES = 1 << 26
"""Token files up to this size are compared with their checksums when they are opened, which takes less than a second.
Of larger ones every block is when it is first read."""


@dataclass(frozen=True)
class TokenStoreMeta:
    """What is known of a tokenised corpus without reading it."""

    dtype: str
    num_documents: int
    """Of both splits, those without text among them."""
    num_empty_documents: int
    num_train_tokens: int
    num_validation_tokens: int
    vocab_size: int
    eod_id: int
    unigram_entropy_nats: float
    fingerprint: str
    """Hash of all tokens and of the split: equal for equal data, wherever it was prepared."""
    has_prompts: bool = False
    """Whether every document is a prompt and a completion, of which only the completion is learned."""


@dataclass(frozen=True)
class MappedTokens:
    """The tokens of one split, mapped into memory."""

    path: Path
    tokens: TokenArray
    """Shape [tokens]."""
    checksums: BlockChecksums | None
    """Of the file; None for one of a tool that writes none."""
    first_token: int = 0
    """Where ``tokens`` begin in the file."""
    remedy: str = REBUILD
    """What a message tells the user to do about damaged tokens."""
    prompts: PromptSpans | None = None


def open_token_store(folder: Path) -> tuple[TokenStoreMeta, MappedTokens, MappedTokens]:
    """Read the record, and map the training and validation tokens into memory.

    Raises:
        UserError: the files are not those that were written.
    """
    try:
        meta = read_meta(folder / META_FILE)
        train = _map(folder / TRAIN, meta, meta.num_train_tokens)
        validation = _map(folder / VALIDATION, meta, meta.num_validation_tokens)
        if train.tokens.nbytes + validation.tokens.nbytes <= VERIFIED_BYTES:
            for file in (train, validation):
                _verify(file, meta.vocab_size)
    except (OSError, ValueError, TypeError, UserError) as error:
        raise damaged_store(folder, error) from error
    return meta, train, validation


def read_meta(path: Path) -> TokenStoreMeta:
    """Read what is known of a corpus; an OSError, ValueError or TypeError says that it cannot be."""
    return TokenStoreMeta(**json.loads(path.read_text(encoding="utf-8")))


def write_meta(path: Path, meta: TokenStoreMeta) -> None:
    """Write what is known of a corpus."""
    path.write_text(json.dumps(asdict(meta), indent=2) + "\n", encoding="utf-8")


def damaged_store(folder: Path, error: Exception) -> UserError:
    """Say that a folder of the cache is not as it was written."""
    return UserError(
        f"the tokenised corpus in {folder} is damaged ({error}); delete that folder, and the next start builds it again"
    )


def store_fingerprint(train_digest: bytes, validation_digest: bytes) -> str:
    """Combine the SHA-256 of both files."""
    return hashlib.sha256(train_digest + validation_digest).hexdigest()


def _verify(file: MappedTokens, vocab_size: int) -> None:
    """Read all tokens; a ValueError says that they are not those that were written."""
    damaged = file.checksums.first_damaged(0, len(file.tokens)) if file.checksums is not None else None
    if damaged is not None:
        raise ValueError(f"{file.path.name} has {describe_damage(file.tokens[damaged], damaged.start, vocab_size)}")


def unigram_entropy_nats(counts: npt.NDArray[np.int64]) -> float:
    """Compute the loss (nats per token) of a model that knows each token's frequency alone; 0 without tokens.

    ``counts`` has shape [vocab_size].
    """
    # Tokens that do not occur are left out: their share times its logarithm counts 0, but is NaN in floats.
    shares = counts[counts > 0] / max(1, counts.sum())
    return float(-(shares * np.log(shares)).sum())


def _map(prefix: Path, meta: TokenStoreMeta, num_tokens: int) -> MappedTokens:
    """Map a pair and its checksums into memory; a ValueError or UserError says that it is not the recorded one."""
    indexed = open_indexed(prefix)
    path = tokens_path(prefix)
    if indexed.tokens.dtype != np.dtype(meta.dtype):
        raise ValueError(f"{path.name} has ids of the type {indexed.tokens.dtype.str} instead of {meta.dtype}")
    if len(indexed.tokens) != num_tokens:
        raise ValueError(f"{path.name} has {len(indexed.tokens):,} tokens instead of {num_tokens:,}")
    checksums = BlockChecksums(indexed.tokens, checksums_path(prefix))
    return MappedTokens(path, indexed.tokens, checksums, prompts=PromptSpans(indexed) if meta.has_prompts else None)
