"""A tokenizer as a user would add one: a section, a kind, a line in ``TOKENIZERS``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal
from unittest import mock

from pydantic import Field

from megastable.config import ModelConfig
from megastable.config.data import TokenizerSection
from megastable.config.section import Section
from megastable.data.text_tokenizers import TOKENIZERS, check_fits_model
from tests.support.toy_source import data_section_added


class LengthsTokenizerConfig(Section):
    """One token a word: its length, up to a longest one."""

    type: Literal["lengths"] = Field(description="The lengths of words.")
    longest: int = Field(default=20, ge=1, description="Length that longer words have as well.")


class LengthsTokenizer:
    """Ids are lengths; 0 ends a document."""

    eod_id = 0

    def __init__(self, longest: int) -> None:
        self.vocab_size = longest + 1

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [[min(len(word), self.vocab_size - 1) for word in text.split()] for text in texts]

    def pieces(self, text: str, characters: int) -> list[str]:
        return [text]

    def save(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text("{}")


class LengthsKind:
    """Makes the tokenizer that a ``LengthsTokenizerConfig`` describes."""

    def identity(self, spec: LengthsTokenizerConfig, model: ModelConfig) -> str:
        return f"lengths {spec.longest}"

    def make(self, spec: LengthsTokenizerConfig, model: ModelConfig, training_texts: Iterable[str]) -> LengthsTokenizer:
        tokenizer = LengthsTokenizer(spec.longest)
        check_fits_model(tokenizer.vocab_size, tokenizer.eod_id, model)
        return tokenizer


@contextlib.contextmanager
def lengths_tokenizer_registered() -> Iterator[None]:
    """Add the tokenizer to the registry and its section to the schema, and take both out again."""
    kind = LengthsKind()
    with mock.patch.dict(TOKENIZERS, {"lengths": kind}), data_section_added(TokenizerSection, LengthsTokenizerConfig):
        yield
