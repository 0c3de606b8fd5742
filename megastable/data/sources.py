"""Where documents come from.

To add a source: its section in ``config/data.py``, a function or class in a file beside this one that opens it as a
``DocumentSource``, and a line in ``SOURCES``. Nothing else asks of which class a source is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megastable.config import SourceConfig
from megastable.data.hf_rows import open_hf
from megastable.data.json_lines import JsonLines
from megastable.data.synthetic import SyntheticDocuments
from megastable.data.text_files import open_stdlib, open_text


class DocumentSource(Protocol):
    """Documents in a fixed order, each read when it is asked for."""

    @property
    def name(self) -> str:
        """Return what messages call this source, such as its path."""
        ...

    def __len__(self) -> int:
        """Count the documents."""
        ...

    def __getitem__(self, index: int) -> str:
        """Read one document.

        Raises:
            UserError: it cannot be read as text; the document is named.
        """
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


@dataclass(frozen=True)
class SourceKind:
    """What is known of a type of source before one is opened."""

    open: Callable[[Any], DocumentSource]
    """Opens the source that a section of the run file describes; a UserError says why it cannot be opened."""
    may_download: bool = False
    """Whether opening may fetch documents over the network, which a check of the run file must not do."""
    reads_in_order: Callable[[Any], bool] = lambda spec: False
    """Whether a source of this section is read from its begin to its end, so that going back takes long."""


SOURCES: dict[str, SourceKind] = {
    "stdlib": SourceKind(open_stdlib),
    "text": SourceKind(open_text),
    "jsonl": SourceKind(JsonLines, reads_in_order=lambda spec: True),
    "hf": SourceKind(open_hf, may_download=True, reads_in_order=lambda spec: spec.stream_rows is not None),
    "synthetic": SourceKind(SyntheticDocuments),
}
"""Kinds of sources, by the ``type`` of their section of the run file."""


def open_source(spec: SourceConfig) -> DocumentSource:
    """Open the documents that ``spec`` names.

    Raises:
        UserError: the source is not there or has no document.
    """
    return SOURCES[spec.type].open(spec)


def reads_in_order(spec: SourceConfig) -> bool:
    """Tell whether going back in a source takes long, as in a compressed file or a stream."""
    return SOURCES[spec.type].reads_in_order(spec)
