"""Token files: what a tokenised corpus looks like on disk, writing it and mapping it into memory."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megastable.core.errors import UserError
from megastable.data.dataset import TokenArray
from megastable.data.text_tokenizers import TextTokenizer

FORMAT_VERSION = 1
TRAIN_FILE, VALIDATION_FILE, META_FILE, TOKENIZER_FOLDER = "train.bin", "validation.bin", "meta.json", "tokenizer"

VERIFIED_BYTES = 1 << 26
"""Token files up to this size are read and compared with their hash whenever they are opened, which takes less than a
second. Of larger ones only the size is; their ids are compared with the vocabulary as they are read."""

# A longer document is encoded in pieces: in parallel, and without all of its ids in memory at once.
_PIECE_CHARACTERS = 1 << 20
# Enough pieces at a time to keep the cores busy.
_BATCH_CHARACTERS = 1 << 22


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


class _TokenFile:
    """Appends tokens to a file, counts them by id and hashes them."""

    def __init__(self, path: Path, dtype: npt.DTypeLike, vocab_size: int) -> None:
        self._file = path.open("wb")
        self._dtype = dtype
        self.counts = np.zeros(vocab_size, dtype=np.int64)
        self.digest = hashlib.sha256()

    def append(self, ids: npt.NDArray[Any]) -> None:
        """Write the token ids (any number, shape [n]) at the end of the file."""
        stored = ids.astype(self._dtype).tobytes()
        self._file.write(stored)
        self.digest.update(stored)
        self.counts += np.bincount(ids, minlength=len(self.counts))

    def close(self) -> None:
        """Close the file when its tokens are on disk, not only in the system's memory."""
        # The folder is renamed next: a power cut must not leave a finished folder with empty files.
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


def write_token_store(folder: Path, documents: Iterable[tuple[str, bool]], tokenizer: TextTokenizer) -> None:
    """Tokenise ``documents``, each (text, is it for validation), into ``folder``.

    Every document ends with the EOD id; those without text are left out.
    """
    eod = np.array([tokenizer.eod_id], dtype=np.int64)
    nothing = eod[:0]
    # Little-endian wherever it is written, so that a cache can be copied between machines.
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32).newbyteorder("<")
    with ExitStack() as stack:
        files = [_TokenFile(folder / name, dtype, tokenizer.vocab_size) for name in (TRAIN_FILE, VALIDATION_FILE)]
        for file in files:
            stack.callback(file.close)
        for pieces in _batches(documents):
            encoded = tokenizer.encode_batch([piece.text for piece in pieces])
            # What goes to the training and to the validation file; `nothing` makes an empty one join as well.
            streams: tuple[list[Any], list[Any]] = ([nothing], [nothing])
            for piece, ids in zip(pieces, encoded, strict=True):
                stream = streams[1 if piece.is_validation else 0]
                stream.append(np.asarray(ids, np.int64))
                if piece.ends_document:
                    stream.append(eod)
            for file, stream in zip(files, streams, strict=True):
                file.append(np.concatenate(stream))
    train, validation = files
    meta = TokenStoreMeta(
        dtype=dtype.str,
        num_train_tokens=int(train.counts.sum()),
        num_validation_tokens=int(validation.counts.sum()),
        vocab_size=tokenizer.vocab_size,
        eod_id=tokenizer.eod_id,
        unigram_entropy_nats=unigram_entropy_nats(train.counts),
        fingerprint=_fingerprint(train.digest.digest(), validation.digest.digest()),
    )
    (folder / TOKENIZER_FOLDER).mkdir()
    tokenizer.save(folder / TOKENIZER_FOLDER)
    (folder / META_FILE).write_text(json.dumps(asdict(meta), indent=2) + "\n", encoding="utf-8")


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


def _fingerprint(train_digest: bytes, validation_digest: bytes) -> str:
    return hashlib.sha256(train_digest + validation_digest).hexdigest()


def _verify(meta: TokenStoreMeta, train: TokenArray, validation: TokenArray) -> None:
    """Read all tokens; a ValueError says that they are not those that were written, and names an impossible one.

    The fingerprint, which every format has, is a hash of the files' own hashes, so that it serves as their checksum.
    """
    if _fingerprint(hashlib.sha256(train).digest(), hashlib.sha256(validation).digest()) == meta.fingerprint:
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


@dataclass(frozen=True)
class _Piece:
    text: str
    is_validation: bool
    ends_document: bool


def _batches(documents: Iterable[tuple[str, bool]]) -> Iterator[list[_Piece]]:
    """Cut documents into pieces, in order, and yield as many at a time as keep the cores busy."""
    batch: list[_Piece] = []
    characters = 0
    for text, is_validation in documents:
        for start in range(0, len(text), _PIECE_CHARACTERS):
            end = start + _PIECE_CHARACTERS
            batch.append(_Piece(text[start:end], is_validation, ends_document=end >= len(text)))
            characters += len(batch[-1].text)
            if characters >= _BATCH_CHARACTERS:
                yield batch
                batch = []
                characters = 0
    if batch:
        yield batch


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
