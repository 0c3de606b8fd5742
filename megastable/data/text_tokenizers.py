"""How text becomes token ids.

To add a tokenizer: its section in ``config/data.py``, a ``TokenizerKind`` and a line in ``TOKENIZERS``. Every
tokenizer is saved as a folder that ``transformers.AutoTokenizer.from_pretrained`` opens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from megastable.config import (
    BpeTokenizerConfig,
    BytesTokenizerConfig,
    ModelConfig,
    TokenizerConfig,
    TransformersTokenizerConfig,
)
from megastable.core.errors import UserError
from megastable.core.user_paths import expanded

END_OF_TEXT = "<|endoftext|>"
NUM_BYTES = 256

# The files that make up a tokenizer. A folder on the hub has a model's weights as well, which are left alone.
_TOKENIZER_FILE_SUFFIXES = frozenset({".json", ".txt", ".model", ".tiktoken"})


class TextTokenizer(Protocol):
    """Encodes documents. Text that spells a special token stays text: only the data layer ends a document."""

    @property
    def vocab_size(self) -> int:
        """Return the size of the vocabulary: ids are in ``[0, vocab_size)``."""
        ...

    @property
    def eod_id(self) -> int:
        """Return the id of the token that ends a document."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> Sequence[Sequence[int] | npt.NDArray[Any]]:
        """Encode each text to its ids, without any special token."""
        ...

    def save(self, folder: Path) -> None:
        """Write the tokenizer into ``folder``, which exists."""
        ...


class TokenizerKind(Protocol):
    """Makes the tokenizers of one type, and names them before they are made."""

    def identity(self, spec: Any, model: ModelConfig) -> str:
        """Return a name that changes whenever the token ids of a text might; it is part of the cache's key."""
        ...

    def make(self, spec: Any, model: ModelConfig, training_texts: Iterable[str]) -> TextTokenizer:
        """Load or train the tokenizer; ``training_texts`` are read only if it is trained.

        Raises:
            UserError: it cannot be loaded, or its vocabulary does not fit the model.
        """
        ...


class BpeTokenizer:
    """Byte-level BPE of the ``tokenizers`` package."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Wrap a trained tokenizer that encodes the spelling of a special token as text."""
        self._tokenizer = tokenizer
        self.vocab_size = tokenizer.get_vocab_size()
        self.eod_id = tokenizer.get_vocab()[END_OF_TEXT]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode each text to its ids; the package spreads the texts over the cores."""
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def save(self, folder: Path) -> None:
        """Write ``tokenizer.json`` and its settings."""
        _save(self._tokenizer, folder)


class BpeKind:
    """Trains on the training documents; the size is the model's vocabulary unless the run file gives another."""

    def identity(self, spec: BpeTokenizerConfig, model: ModelConfig) -> str:
        """Name the size: the rest follows from the documents."""
        return f"bpe {self._vocab_size(spec, model)}"

    def make(self, spec: BpeTokenizerConfig, model: ModelConfig, training_texts: Iterable[str]) -> BpeTokenizer:
        """Train a byte-level BPE.

        Raises:
            UserError: its size has no room for the bytes, or does not fit the model.
        """
        vocab_size = self._vocab_size(spec, model)
        if vocab_size <= NUM_BYTES:
            raise UserError(
                f"megastable.data.tokenizer.vocab_size: {vocab_size} leaves no room for the {NUM_BYTES} bytes and the "
                f"end-of-document token; legal is {NUM_BYTES + 1} or more"
            )
        # Checked before the training, which takes seconds to minutes. Special tokens come first, so the end is id 0.
        check_fits_model(vocab_size, eod_id=0, model=model)
        tokenizer = _byte_level(models.BPE())
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_TEXT],
            # All bytes, whether or not they occur, so that any text can be encoded.
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(training_texts, trainer)
        # Encode a special token's spelling as the characters that it is: a document must not end itself.
        tokenizer.encode_special_tokens = True
        return BpeTokenizer(tokenizer)

    def _vocab_size(self, spec: BpeTokenizerConfig, model: ModelConfig) -> int:
        """Return the number of tokens to learn, with the bytes and the end of a document."""
        return model.vocab_size if spec.vocab_size is None else spec.vocab_size


class BytesTokenizer:
    """Encodes one id a UTF-8 byte; 256 ends a document."""

    vocab_size = NUM_BYTES + 1
    eod_id = NUM_BYTES

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.uint8]]:
        """Return the bytes of each text."""
        return [np.frombuffer(text.encode("utf-8"), dtype=np.uint8) for text in texts]

    def save(self, folder: Path) -> None:
        """Write a BPE without merges that has the same ids."""
        vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
        tokenizer = _byte_level(models.BPE(vocab=vocabulary, merges=[]))
        tokenizer.add_special_tokens([END_OF_TEXT])
        _save(tokenizer, folder)


class BytesKind:
    """Makes the tokenizer of bytes, of which there is one."""

    def identity(self, spec: BytesTokenizerConfig, model: ModelConfig) -> str:
        """Return a constant, since all such tokenizers are equal."""
        return "bytes"

    def make(self, spec: BytesTokenizerConfig, model: ModelConfig, training_texts: Iterable[str]) -> BytesTokenizer:
        """Make the tokenizer; nothing is loaded or trained.

        Raises:
            UserError: it does not fit the model.
        """
        tokenizer = BytesTokenizer()
        check_fits_model(tokenizer.vocab_size, tokenizer.eod_id, model)
        return tokenizer


class TransformersTokenizer:
    """Wraps a tokenizer of the ``transformers`` package, whose end-of-sequence token ends a document."""

    def __init__(self, tokenizer: Any, eod_id: int) -> None:
        """Take a loaded tokenizer and the id of its end-of-sequence token."""
        self._tokenizer = tokenizer
        # Not the number of tokens: some vocabularies have holes.
        self.vocab_size = 1 + max(tokenizer.get_vocab().values())
        self.eod_id = eod_id

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode each text, of any length, to its ids."""
        encoded = self._tokenizer(
            list(texts),
            add_special_tokens=False,
            # As with the BPE: the spelling of a special token is text like any other.
            split_special_tokens=True,
            return_attention_mask=False,
            # Or it warns of every text that is longer than its own model's context.
            verbose=False,
        )
        ids: list[list[int]] = encoded["input_ids"]
        return ids

    def save(self, folder: Path) -> None:
        """Write the package's own files."""
        self._tokenizer.save_pretrained(folder)


class TransformersKind:
    """Loads a tokenizer from a folder, or by its name on the hub."""

    def identity(self, spec: TransformersTokenizerConfig, model: ModelConfig) -> str:
        """Hash the name, and the content of a folder's tokenizer files."""
        digest = hashlib.sha256(spec.path.encode())
        folder = expanded(spec.path)
        # A name on the hub is trusted to stay the same tokenizer: to ask would take a connection at every start.
        files = folder.iterdir() if folder.is_dir() else []
        # Sorted, because a file system lists them in any order.
        for file in sorted(file for file in files if file.suffix in _TOKENIZER_FILE_SUFFIXES):
            digest.update(f"\0{file.name}\0".encode() + file.read_bytes())
        return f"transformers {digest.hexdigest()}"

    def make(
        self, spec: TransformersTokenizerConfig, model: ModelConfig, training_texts: Iterable[str]
    ) -> TransformersTokenizer:
        """Load the tokenizer.

        Raises:
            UserError: it is not found, has no token that ends a document, or does not fit the model.
        """
        # Imported here, because it takes seconds that other tokenizers need not spend.
        from transformers import AutoTokenizer

        key = "megastable.data.tokenizer.path"
        try:
            loaded = AutoTokenizer.from_pretrained(str(expanded(spec.path)))
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise UserError(f"{key}: transformers finds no tokenizer in {spec.path}: {error}") from error
        if loaded.eos_token_id is None:
            raise UserError(
                f"{key}: the tokenizer in {spec.path} has no end-of-sequence token, which is needed to end documents; "
                'give it one: "eos_token" in its tokenizer_config.json'
            )
        tokenizer = TransformersTokenizer(loaded, loaded.eos_token_id)
        check_fits_model(tokenizer.vocab_size, tokenizer.eod_id, model)
        return tokenizer


TOKENIZERS: dict[str, TokenizerKind] = {
    "bpe": BpeKind(),
    "bytes": BytesKind(),
    "transformers": TransformersKind(),
}
"""Kinds of tokenizers, by the ``type`` of their section of the run file."""


def tokenizer_identity(spec: TokenizerConfig, model: ModelConfig) -> str:
    """Return a name that changes whenever the token ids of a text might, but for what follows from the documents."""
    return TOKENIZERS[spec.type].identity(spec, model)


def make_tokenizer(spec: TokenizerConfig, model: ModelConfig, training_texts: Iterable[str]) -> TextTokenizer:
    """Load or train the tokenizer that ``spec`` describes.

    Raises:
        UserError: it cannot be loaded, or its vocabulary does not fit the model.
    """
    return TOKENIZERS[spec.type].make(spec, model, training_texts)


def check_fits_model(vocab_size: int, eod_id: int, model: ModelConfig) -> None:
    """Refuse a tokenizer with ids that the model has no embedding for.

    Raises:
        UserError: naming the key, its value and what is legal.
    """
    needed = max(vocab_size, eod_id + 1)
    if needed > model.vocab_size:
        raise UserError(
            f"megastable.model.vocab_size: {model.vocab_size} is too small for the tokenizer, which has {vocab_size} "
            f"tokens (end-of-document id {eod_id}); legal is {needed} or more"
        )


def _byte_level(model: models.BPE) -> Tokenizer:
    """Make a tokenizer that writes every byte as a printable character and loses nothing, spaces included."""
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _byte_characters() -> list[str]:
    """List the printable character by which byte-level tokenizers write each byte (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(NUM_BYTES) if byte not in printable]
    # A printable byte stands for itself. The others, in order, get the characters from 256 on.
    code_points = {byte: byte for byte in printable}
    code_points |= {byte: NUM_BYTES + index for index, byte in enumerate(others)}
    return [chr(code_points[byte]) for byte in range(NUM_BYTES)]


def _save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write a tokenizer of the ``tokenizers`` package so that ``transformers`` opens it with the same end token."""
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_TEXT}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
