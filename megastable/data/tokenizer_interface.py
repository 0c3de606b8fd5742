"""What the rest of the data layer asks of a tokenizer, and of a kind of tokenizers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy.typing as npt

from megastable.config import ModelConfig


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

    def pieces(self, text: str, characters: int) -> Iterable[str]:
        """Cut a text into pieces of about so many characters whose ids, joined, are those of the text.

        The text as its only piece is right for any tokenizer, but takes the memory of encoding it whole.
        """
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
