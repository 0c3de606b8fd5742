"""What the model reads: the documents, the tokenizer and the split.

A text source or a tokenizer is a section here, with a "type" of its own, and one line of the registry that opens it
(``data/sources.py: SOURCES``, ``data/text_tokenizers.py: TOKENIZERS``).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from megastable.config.limits import LARGEST_FACTOR, LARGEST_VOCABULARY, LONGEST_LIST, MOST_DOCUMENTS, MOST_WORDS
from megastable.config.reading.faults import Fault
from megastable.config.section import ChosenByType, PathText, Section, kinds_of
from megastable.core.blend import LONGEST_PERIOD, whole_weights

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
    prompt_key: NonEmpty | None = Field(
        default=None, description="Key of a prompt, which is read and not learned. null: lines have one text."
    )
    completion_key: NonEmpty | None = Field(
        default=None, description="Key of the completion that is learned after the prompt; goes with prompt_key."
    )


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


class IndexedSourceConfig(SourceSection):
    """Tokens in Megatron's indexed format, made by megastable or another tool with the tokenizer of this run."""

    type: Literal["indexed"] = Field(description="Tokens in Megatron's indexed format (.bin and .idx).")
    path: NonEmptyPath = Field(description="Path of the pair without .bin and .idx.")
    validation_path: NonEmptyPath | None = Field(
        default=None,
        description="Pair to evaluate on. null: the last documents of the pair, a share of validation_fraction.",
    )


if TYPE_CHECKING:
    BlendedSource = SourceSection
else:
    # All sources above; a blend of blends is none.
    BlendedSource = Annotated[reduce(or_, kinds_of(SourceSection)), Field(discriminator="type")]


class WeightedSourceConfig(Section):
    """One source of a blend."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9_.-]{1,40}$", description="Name of the source in metrics: letters, digits and _ . -"
    )
    weight: float = Field(
        gt=0, le=LARGEST_FACTOR, description="Share of the samples, in any unit: a source gets weight / sum of weights."
    )
    source: BlendedSource = Field(description="Any source but a blend; its type decides its other keys.")


class BlendSourceConfig(SourceSection):
    """Several sources, of which every stretch of the run has its share of samples to within one."""

    # The last of the sources, since it holds any of the others.
    type: Literal["blend"] = Field(description="Several sources by weight.")
    sources: tuple[WeightedSourceConfig, ...] = Field(
        min_length=1, max_length=LONGEST_LIST, description="The sources, each with a name and a weight."
    )


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


def text_to_learn_from(source: SourceSection) -> bool:
    """Tell whether a tokenizer can be trained on a source: tokens are none, and a blend wants one for all its parts."""
    return not isinstance(source, IndexedSourceConfig | BlendSourceConfig)


def states_validation(source: SourceSection) -> bool:
    """Tell whether a source names what is for validation, so that no share of it has to be kept."""
    if isinstance(source, BlendSourceConfig):
        return any(states_validation(part.source) for part in source.sources)
    return isinstance(source, IndexedSourceConfig) and source.validation_path is not None


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
    packing: Literal["continuous", "reset"] = Field(
        default="continuous",
        description="Samples hold documents one after the other. continuous: as one text, in which a token sees the "
        "documents before its own. reset: attention and positions begin anew with every document.",
    )

    @property
    def resets_at_documents(self) -> bool:
        """Tell whether attention and positions begin anew with every document."""
        return self.packing == "reset"


def tokenizer_is_made(data: DataConfig) -> Iterator[Fault]:
    """Refuse to train a tokenizer where there is no text for it."""
    if isinstance(data.tokenizer, BpeTokenizerConfig) and not text_to_learn_from(data.source):
        yield Fault(
            "megastable.data.tokenizer",
            data.tokenizer.type,
            f'must be of type "transformers" or "bytes" for a source of type "{data.source.type}": a bpe is trained on '
            "the text of one source (`megastable tokenizer train` makes one from any)",
        )


def blend_has_names(data: DataConfig) -> Iterator[Fault]:
    """Refuse a blend whose metrics would share a name."""
    if not isinstance(data.source, BlendSourceConfig):
        return
    names = [part.name for part in data.source.sources]
    for index, name in enumerate(names):
        if name in names[:index]:
            yield Fault(
                f"megastable.data.source.sources[{index}].name", name, "must differ from those of the sources before it"
            )


def blend_repeats(data: DataConfig) -> Iterator[Fault]:
    """Refuse weights whose blend cannot be kept to one sample by a table."""
    if not isinstance(data.source, BlendSourceConfig):
        return
    period = sum(whole_weights([part.weight for part in data.source.sources]))
    if period > LONGEST_PERIOD:
        yield Fault(
            "megastable.data.source.sources",
            [part.weight for part in data.source.sources],
            f"must have weights of fewer digits: in whole numbers of their ratio they sum to {period:,}, legal is at "
            f"most {LONGEST_PERIOD:,}",
        )


def prompts_have_completions(data: DataConfig) -> Iterator[Fault]:
    """Refuse one key of a prompt and its completion without the other, or beside a key that is not read then."""
    key = "megastable.data.source"
    sources = {key: data.source}
    if isinstance(data.source, BlendSourceConfig):
        sources = {f"{key}.sources[{index}].source": part.source for index, part in enumerate(data.source.sources)}
    for path, source in sources.items():
        if not isinstance(source, JsonlSourceConfig):
            continue
        if (source.prompt_key is None) != (source.completion_key is None):
            yield Fault(f"{path}.prompt_key", source.prompt_key, "goes with completion_key: give both or neither")
        elif source.prompt_key is not None and source.text_key != "text":
            yield Fault(f"{path}.text_key", source.text_key, "is not read beside prompt_key; remove one of them")
