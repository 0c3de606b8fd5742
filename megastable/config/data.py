"""What the model reads: the documents, the tokenizer and the split.

A text source or a tokenizer is a section here, with a "type" of its own, and one line of the registry that opens it
(``data/sources.py: SOURCES``, ``data/text_tokenizers.py: TOKENIZERS``).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megastable.config.limits import LARGEST_VOCABULARY, MOST_DOCUMENTS, MOST_WORDS
from megastable.config.section import ChosenByType, PathText, Section

# An empty path is the working directory to Python, which nobody means by it.
NonEmpty = Annotated[str, Field(min_length=1)]
NonEmptyPath = Annotated[PathText, Field(min_length=1)]

NUM_BYTES = 256
SMALLEST_BYTE_VOCAB = NUM_BYTES + 1
"""Every byte and the end-of-document token."""


class SourceSection(Section):
    """The base of the text sources; every subclass narrows ``type`` to the one name that chooses it."""

    type: str


class StdlibSourceConfig(SourceSection):
    """The source code of Python's standard library, which every machine has: for trying things out."""

    type: Literal["stdlib"] = Field(description="Python's standard library.")


class TextSourceConfig(SourceSection):
    """Plain text files, one document each."""

    type: Literal["text"] = Field(description="Plain text files.")
    path: NonEmptyPath = Field(description="A file, a folder (read recursively) or a glob pattern.")


class JsonlSourceConfig(SourceSection):
    """Files of JSON lines, one document a line, also compressed (.gz, .zst)."""

    type: Literal["jsonl"] = Field(description="Files of JSON lines.")
    path: NonEmptyPath = Field(
        description="A file, a folder (its .jsonl, .jsonl.gz and .jsonl.zst files, read recursively) or a glob pattern."
    )
    text_key: NonEmpty = Field(default="text", description="Key of each line's object that holds the text.")


class HfSourceConfig(SourceSection):
    """A Hugging Face dataset, one document a row."""

    type: Literal["hf"] = Field(description="A Hugging Face dataset.")
    path: NonEmptyPath = Field(description="A folder written by save_to_disk, or a dataset's name.")
    name: str | None = Field(default=None, description="Configuration of the dataset, where it has several.")
    split: NonEmpty = Field(default="train", description="Split to read.")
    text_column: NonEmpty = Field(default="text", description="Column that holds the text.")
    stream_rows: int | None = Field(
        default=None,
        ge=1,
        le=MOST_DOCUMENTS,
        description="Rows to read, as a stream without a copy of the dataset on disk. null: all rows, from a copy.",
    )


class SyntheticSourceConfig(SourceSection):
    """Documents of words that are drawn from a seed, the same on every machine: for work on throughput."""

    type: Literal["synthetic"] = Field(description="Words drawn from a seed.")
    num_documents: int = Field(default=10_000, ge=1, le=MOST_DOCUMENTS, description="Documents.")
    words_per_document: int = Field(
        default=200,
        ge=1,
        le=MOST_WORDS,
        description="Words of a document on average; each has half to one and a half times as many.",
    )
    seed: int = Field(default=0, ge=0, le=2**32 - 1, description="Other seeds draw other words.")


SourceConfig = Annotated[SourceSection, ChosenByType()]
"""Any of the sources above."""


class TokenizerSection(Section):
    """The base of the tokenizers; every subclass narrows ``type`` to the one name that chooses it."""

    type: str


class BpeTokenizerConfig(TokenizerSection):
    """A byte-level BPE that is trained on the training documents."""

    type: Literal["bpe"] = Field(description="Byte-level BPE, trained on the training documents.")
    vocab_size: int | None = Field(
        default=None,
        ge=SMALLEST_BYTE_VOCAB,
        le=LARGEST_VOCABULARY,
        description="Tokens to learn, with the 256 bytes and the end-of-document token. null: model.vocab_size.",
    )


class BytesTokenizerConfig(TokenizerSection):
    """One token a byte (ids 0 to 255) and the end-of-document token 256."""

    type: Literal["bytes"] = Field(description="One token a byte.")


class TransformersTokenizerConfig(TokenizerSection):
    """A tokenizer that transformers.AutoTokenizer loads."""

    type: Literal["transformers"] = Field(description="A tokenizer of the transformers package.")
    path: NonEmptyPath = Field(description="Folder of the tokenizer, or its name on the hub.")


TokenizerConfig = Annotated[TokenizerSection, ChosenByType()]
"""Any of the tokenizers above."""


class DataConfig(Section):
    """What the model reads."""

    source: SourceConfig = Field(description="Where the documents come from; its type decides its other keys.")
    tokenizer: TokenizerConfig = Field(
        default_factory=lambda: BpeTokenizerConfig(type="bpe"),
        description="How text becomes token ids; its type decides its other keys. Default: bpe.",
    )
    validation_fraction: float = Field(
        default=0.02, ge=0, lt=1, description="Share of the documents that is kept for validation."
    )
    cache_dir: NonEmptyPath | None = Field(
        default=None, description="Folder for tokenised corpora. null: ~/.cache/megastable."
    )
