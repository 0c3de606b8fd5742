"""How text becomes token ids.

To add a tokenizer: its section in ``config/data.py``, a ``TokenizerKind`` and a line in ``TOKENIZERS``. Every
tokenizer is saved as a folder that ``transformers.AutoTokenizer.from_pretrained`` opens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from megastable.config import (
    BpeTokenizerConfig,
    BytesTokenizerConfig,
    ModelConfig,
    TokenizerConfig,
    TransformersTokenizerConfig,
)
from megastable.core.errors import UserError, first_line
from megastable.core.user_paths import expanded
from megastable.data.byte_level import END_OF_TEXT, NUM_BYTES, byte_characters, byte_level, save_tokenizer
from megastable.data.seams import pieces_between_words
from megastable.data.tokenizer_interface import TextTokenizer, TokenizerKind

SEAM_CONTEXT = 256
"""Characters on either side of a cut that are encoded to see whether it changes them; tokens depend on fewer."""
TRAINING_PIECE_CHARACTERS = 1 << 16
"""The trainer reads 256 texts ahead and takes some hundred bytes for each of their characters."""

# The files that make up a tokenizer. A folder on the hub has a model's weights as well, which are left alone.
_TOKENIZER_FILE_SUFFIXES = frozenset({".json", ".txt", ".model", ".tiktoken"})


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

    def pieces(self, text: str, characters: int) -> Iterable[str]:
        """Cut a text between words, which the merges never cross."""
        return pieces_between_words(text, characters)

    def save(self, folder: Path) -> None:
        """Write ``tokenizer.json`` and its settings."""
        save_tokenizer(self._tokenizer, folder)


def train_bpe(vocab_size: int, texts: Iterable[str]) -> BpeTokenizer:
    """Train a byte-level BPE of ``vocab_size`` tokens, the bytes and the end-of-document token among them."""
    tokenizer = byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        # All bytes, whether or not they occur, so that any text can be encoded.
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # In pieces: for a whole text of 100 MB the trainer takes 8 GB. Cut between words, they have the same words.
    pieces = (piece for text in texts for piece in pieces_between_words(text, TRAINING_PIECE_CHARACTERS))
    tokenizer.train_from_iterator(pieces, trainer)
    # Encode a special token's spelling as the characters that it is: a document must not end itself.
    tokenizer.encode_special_tokens = True
    return BpeTokenizer(tokenizer)


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
        return train_bpe(vocab_size, training_texts)

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

    def pieces(self, text: str, characters: int) -> Iterable[str]:
        """Cut a text anywhere between two characters."""
        return (text[start : start + characters] for start in range(0, len(text), characters))

    def save(self, folder: Path) -> None:
        """Write a BPE without merges that has the same ids."""
        vocabulary = {character: byte for byte, character in enumerate(byte_characters())}
        tokenizer = byte_level(models.BPE(vocab=vocabulary, merges=[]))
        tokenizer.add_special_tokens([END_OF_TEXT])
        save_tokenizer(tokenizer, folder)


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

    def pieces(self, text: str, characters: int) -> Iterable[str]:
        """Cut a text between words where that leaves the ids around the cut as they are.

        Some tokenizers put a space before every text that they are given, or normalise its ends.
        """
        return pieces_between_words(text, characters, self._is_seam)

    def _is_seam(self, text: str, position: int) -> bool:
        before = text[max(0, position - SEAM_CONTEXT) : position]
        after = text[position : position + SEAM_CONTEXT]
        whole, left, right = self.encode_batch([before + after, before, after])
        return whole == left + right

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
        tokenizer = load_transformers_tokenizer(spec.path, "megastable.data.tokenizer.path")
        check_fits_model(tokenizer.vocab_size, tokenizer.eod_id, model)
        return tokenizer


def named_tokenizer(name: str, key: str) -> TextTokenizer:
    """Return the tokenizer that a command line names: ``bytes``, or what transformers loads.

    Args:
        key: what a message calls the place where the name was given.

    Raises:
        UserError: it cannot be loaded.
    """
    # A folder of that name can still be meant by ./bytes.
    return BytesTokenizer() if name == "bytes" else load_transformers_tokenizer(name, key)


def load_transformers_tokenizer(path: str, key: str) -> TransformersTokenizer:
    """Load a tokenizer from a folder, or by its name on the hub.

    Args:
        key: what a message calls the place where the path was given.

    Raises:
        UserError: it is not found, or has no token that ends a document.
    """
    # What can only be a path is not looked for on the hub, which takes a minute where there is no network.
    if path.startswith((".", "/", "~")) and not expanded(path).exists():
        raise UserError(f"{key}: there is no folder {path}")
    # Imported here, because it takes seconds that other tokenizers need not spend.
    from transformers import AutoTokenizer

    try:
        # False, and not left out: then transformers asks on the terminal whether to run a folder's own code.
        loaded = AutoTokenizer.from_pretrained(str(expanded(path)), trust_remote_code=False)
    except Exception as error:
        # Broken files raise errors of many types, tokenizers even plain ones.
        why = f"transformers finds no tokenizer in {path}: {first_line(error)}"
        if "trust_remote_code" in str(error):
            why = f"the tokenizer in {path} has code of its own, which is not run; legal are tokenizers without"
        raise UserError(f"{key}: {why}") from error
    if not loaded.get_vocab():
        raise UserError(f"{key}: the tokenizer in {path} has no tokens")
    if loaded.eos_token_id is None:
        raise UserError(
            f"{key}: the tokenizer in {path} has no end-of-sequence token, which is needed to end documents; "
            'give it one: "eos_token" in its tokenizer_config.json'
        )
    return TransformersTokenizer(loaded, loaded.eos_token_id)


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
