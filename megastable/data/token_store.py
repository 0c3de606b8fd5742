"""Token files: what a tokenised corpus looks like on disk, and mapping it into memory."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megastable.core.errors import UserError
from megastable.data.block_checksums import BlockChecksums, TokenArray, describe_damage

FORMAT_VERSION = 2
"""Stores of version 1 have no checksums, and some of them line feeds where the text has carriage returns: nothing looks
for them, and their corpora are built anew."""
TRAIN_FILE, VALIDATION_FILE, META_FILE, TOKENIZER_FOLDER = "train.bin", "validation.bin", "meta.json", "tokenizer"

VERIFIED_BYTES = 1 << 26
"""Token files up to this size are compared with their checksums when they are opened, which takes less than a second.
Of larger ones every block is when it is first read."""


@dataclass(frozen=True)
class TokenStoreMeta:
    """What is known of a tokenised corpus without reading it."""

    dtype: str
    num_train_tokens: int
    num_validation_tokens: int
    vocab_size: int
    eod_id: int
    unigram_entropy_nats: float
    fingerprint: str
    """Hash of all tokens and of the split: equal for equal data, wherever it was prepared."""


@dataclass(frozen=True)
class MappedTokens:
    """A token file that is mapped into memory."""

    path: Path
    tokens: TokenArray
    checksums: BlockChecksums


def open_token_store(folder: Path) -> tuple[TokenStoreMeta, MappedTokens, MappedTokens]:
    """Read the record, and map the training and validation tokens into memory.

    Raises:
        UserError: the files are not those that were written.
    """
    try:
        meta = TokenStoreMeta(**json.loads((folder / META_FILE).read_text(encoding="utf-8")))
        train = _map(folder / TRAIN_FILE, meta.dtype, meta.num_train_tokens)
        validation = _map(folder / VALIDATION_FILE, meta.dtype, meta.num_validation_tokens)
        if train.tokens.nbytes + validation.tokens.nbytes <= VERIFIED_BYTES:
            for file in (train, validation):
                _verify(file, meta.vocab_size)
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            f"the tokenised corpus in {folder} is damaged ({error}); delete that folder, and the next start builds it "
            "again"
        ) from error
    return meta, train, validation


def store_fingerprint(train_digest: bytes, validation_digest: bytes) -> str:
    """Combine the SHA-256 of both files."""
    return hashlib.sha256(train_digest + validation_digest).hexdigest()


def checksums_path(token_file: Path) -> Path:
    """Return where the checksums of a token file are."""
    return token_file.with_suffix(".crc32")


def _verify(file: MappedTokens, vocab_size: int) -> None:
    """Read all tokens; a ValueError says that they are not those that were written."""
    damaged = file.checksums.first_damaged(0, len(file.tokens))
    if damaged is not None:
        raise ValueError(f"{file.path.name} has {describe_damage(file.tokens[damaged], damaged.start, vocab_size)}")


def unigram_entropy_nats(counts: npt.NDArray[np.int64]) -> float:
    """Compute the loss (nats per token) of a model that knows each token's frequency alone; 0 without tokens.

    ``counts`` has shape [vocab_size].
    """
    # Tokens that do not occur are left out: their share times its logarithm counts 0, but is NaN in floats.
    shares = counts[counts > 0] / max(1, counts.sum())
    return float(-(shares * np.log(shares)).sum())


def _map(path: Path, dtype: str, num_tokens: int) -> MappedTokens:
    """Map a token file and its checksums into memory; a ValueError says that a size is not the recorded one."""
    expected = num_tokens * np.dtype(dtype).itemsize
    found = path.stat().st_size
    if found != expected:
        raise ValueError(f"{path.name} has {found:,} bytes instead of {expected:,}")
    tokens: TokenArray = np.zeros(0, dtype=dtype)
    # An empty file cannot be mapped.
    if num_tokens > 0:
        tokens = np.memmap(path, dtype=dtype, mode="r", shape=(num_tokens,))
    return MappedTokens(path, tokens, BlockChecksums(tokens, checksums_path(path)))
