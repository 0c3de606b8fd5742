"""Token files: what a tokenised corpus looks like on disk, and mapping it into memory."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megastable.core.errors import UserError
from megastable.data.dataset import TokenArray

FORMAT_VERSION = 1
TRAIN_FILE, VALIDATION_FILE, META_FILE, TOKENIZER_FOLDER = "train.bin", "validation.bin", "meta.json", "tokenizer"

VERIFIED_BYTES = 1 << 26
"""Token files up to this size are read and compared with their hash whenever they are opened, which takes less than a
second. Of larger ones only the size is; their ids are compared with the vocabulary as they are read."""


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
    keeps_carriage_returns: bool = False
    """False in stores of versions that read every carriage return as a line feed, unless the text was looked through
    since and has none."""


def open_token_store(folder: Path) -> tuple[TokenStoreMeta, TokenArray, TokenArray]:
    """Read the record, and map the training and validation tokens into memory.

    Raises:
        UserError: the files are not those that were written.
    """
    try:
        meta = TokenStoreMeta(**json.loads((folder / META_FILE).read_text(encoding="utf-8")))
        train = _map(folder / TRAIN_FILE, meta.dtype, meta.num_train_tokens)
        validation = _map(folder / VALIDATION_FILE, meta.dtype, meta.num_validation_tokens)
        if train.nbytes + validation.nbytes <= VERIFIED_BYTES:
            _verify(meta, train, validation)
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            f"the tokenised corpus in {folder} is damaged ({error}); delete that folder, and the next start builds it "
            "again"
        ) from error
    return meta, train, validation


def keeps_carriage_returns(folder: Path) -> bool:
    """Tell whether a store is known to have its text's carriage returns; a record that cannot be read is no answer."""
    try:
        record = json.loads((folder / META_FILE).read_text(encoding="utf-8"))
        return bool(record.get("keeps_carriage_returns"))
    except (OSError, ValueError, AttributeError):
        return True  # opening the store will say what is wrong with it


def note_that_text_has_no_carriage_return(folder: Path) -> None:
    """Write into a store's record that its text was looked through, where the folder can be written."""
    record = json.loads((folder / META_FILE).read_text(encoding="utf-8"))
    try:
        beside = folder / f"{META_FILE}.{os.getpid()}"
        beside.write_text(json.dumps(record | {"keeps_carriage_returns": True}, indent=2) + "\n", encoding="utf-8")
        os.replace(beside, folder / META_FILE)
    except OSError:
        return  # a cache that others have made: the next start looks through the text once more


def store_fingerprint(train_digest: bytes, validation_digest: bytes) -> str:
    """Combine the SHA-256 of both files."""
    return hashlib.sha256(train_digest + validation_digest).hexdigest()


def _verify(meta: TokenStoreMeta, train: TokenArray, validation: TokenArray) -> None:
    """Read all tokens; a ValueError says that they are not those that were written, and names an impossible one.

    The fingerprint, which every format has, is a hash of the files' own hashes, so that it serves as their checksum.
    """
    if (
        store_fingerprint(hashlib.sha256(train.data).digest(), hashlib.sha256(validation.data).digest())
        == meta.fingerprint
    ):
        return
    for name, tokens in ((TRAIN_FILE, train), (VALIDATION_FILE, validation)):
        outside = np.flatnonzero(tokens >= meta.vocab_size)
        if len(outside):
            first = outside[0]
            raise ValueError(f"{name} has the id {tokens[first]} at token {first:,}, outside {meta.vocab_size:,} ids")
    raise ValueError("its tokens are not those that were written: their hash differs")


def unigram_entropy_nats(counts: npt.NDArray[np.int64]) -> float:
    """Compute the loss (nats per token) of a model that knows each token's frequency alone; 0 without tokens.

    ``counts`` has shape [vocab_size].
    """
    # Tokens that do not occur are left out: their share times its logarithm counts 0, but is NaN in floats.
    shares = counts[counts > 0] / max(1, counts.sum())
    return float(-(shares * np.log(shares)).sum())


def _map(path: Path, dtype: str, num_tokens: int) -> TokenArray:
    """Map a token file into memory, shape [num_tokens]; a ValueError says that its size is not the recorded one."""
    expected = num_tokens * np.dtype(dtype).itemsize
    found = path.stat().st_size
    if found != expected:
        raise ValueError(f"{path.name} has {found:,} bytes instead of {expected:,}")
    # An empty file cannot be mapped.
    if num_tokens == 0:
        return np.zeros(0, dtype=dtype)
    return np.memmap(path, dtype=dtype, mode="r", shape=(num_tokens,))
