"""Where documents come from.

To add a source: its section in ``config/data.py``, a function or class in a file beside this one that opens it as a
``DocumentSource``, and a line in ``SOURCES``. Nothing else asks of which class a source of documents is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from megastable.config import BlendSourceConfig, SourceConfig
from megastable.core.errors import UserError
from megastable.data.hf_rows import open_hf
from megastable.data.indexed_source import IndexedSource
from megastable.data.json_lines import JsonLines
from megastable.data.prompts import Document
from megastable.data.synthetic import SyntheticDocuments
from megastable.data.text_files import open_stdlib, open_text


class Source(Protocol):
    """What is known of a source of any kind once it is open."""

    @property
    def name(self) -> str:
        """Return what messages call this source, such as its path."""
        ...

    def __len__(self) -> int:
        """Count the documents."""
        ...

    def num_bytes(self) -> int | None:
        """Return the size of all documents as UTF-8; None where it is not known without reading them.

        ``megastable check`` estimates from it whether the text fills a step.
        """
        ...

    def remarks(self) -> Sequence[str]:
        """Return lines for the user on what was left out; a run prints them at its start."""
        ...

    def fingerprint(self) -> str:
        """Return a hash that changes whenever the documents do, as far as it can be known without reading them all.

        It decides which tokenised corpus of the cache belongs to the source.
        """
        ...


class DocumentSource(Source, Protocol):
    """Documents in a fixed order, each read when it is asked for."""

    def __getitem__(self, index: int) -> Document:
        """Read one document.

        Raises:
            UserError: it cannot be read as text; the document is named.
        """
        ...


class BlendedSources:
    """Several sources, each with its share of the samples."""

    def __init__(self, spec: BlendSourceConfig) -> None:
        """Open all sources; a UserError names the one that cannot be opened."""
        self.name = f"a blend of {', '.join(part.name for part in spec.sources)}"
        self._parts = []
        for index, part in enumerate(spec.sources):
            with naming_part(index):
                self._parts.append((part.name, open_source(part.source)))

    def __len__(self) -> int:
        return sum(len(source) for _, source in self._parts)

    def num_bytes(self) -> int | None:
        """Add the sizes of all sources; None where that of one is not known."""
        total = 0
        for _, source in self._parts:
            size = source.num_bytes()
            if size is None:
                return None
            total += size
        return total

    def remarks(self) -> Sequence[str]:
        """Return those of all sources."""
        return [f"{name}: {remark}" for name, source in self._parts for remark in source.remarks()]

    def fingerprint(self) -> str:
        """Join those of all sources."""
        return " ".join(source.fingerprint() for _, source in self._parts)


@contextmanager
def naming_part(index: int) -> Iterator[None]:
    """Let an error of a blend's part name the keys of that part."""
    try:
        yield
    except UserError as error:
        key = "megastable.data.source"
        raise UserError(str(error).replace(f"{key}.", f"{key}.sources[{index}].source.", 1)) from error


@dataclass(frozen=True)
class SourceKind:
    """What is known of a type of source before one is opened."""

    open: Callable[[Any], Source]
    """Opens the source that a section of the run file describes; a UserError says why it cannot be opened."""
    may_download: bool = False
    """Whether opening may fetch documents over the network, which a check of the run file must not do."""
    reads_in_order: Callable[[Any], bool] = lambda spec: False
    """Whether a source of this section is read from its begin to its end, so that going back takes long."""
    has_prompts: Callable[[Any], bool] = lambda spec: False
    """Whether the documents of this section are prompts with completions."""


SOURCES: dict[str, SourceKind] = {
    "stdlib": SourceKind(open_stdlib),
    "text": SourceKind(open_text),
    "jsonl": SourceKind(
        JsonLines, reads_in_order=lambda spec: True, has_prompts=lambda spec: spec.prompt_key is not None
    ),
    "hf": SourceKind(open_hf, may_download=True, reads_in_order=lambda spec: spec.stream_rows is not None),
    "synthetic": SourceKind(SyntheticDocuments),
    "indexed": SourceKind(IndexedSource),
    "blend": SourceKind(BlendedSources),
}
"""Kinds of sources, by the ``type`` of their section of the run file."""


def open_source(spec: SourceConfig) -> Source:
    """Open the documents or tokens that ``spec`` names.

    Raises:
        UserError: the source is not there or has no document.
    """
    return SOURCES[spec.type].open(spec)


def may_download(spec: SourceConfig) -> bool:
    """Tell whether opening a source, or a part of it, may fetch documents over the network."""
    parts = [part.source for part in spec.sources] if isinstance(spec, BlendSourceConfig) else [spec]
    return any(SOURCES[part.type].may_download for part in parts)


def reads_in_order(spec: SourceConfig) -> bool:
    """Tell whether going back in a source takes long, as in a compressed file or a stream."""
    return SOURCES[spec.type].reads_in_order(spec)


def has_prompts(spec: SourceConfig) -> bool:
    """Tell whether the documents of a source are prompts with completions."""
    return SOURCES[spec.type].has_prompts(spec)
