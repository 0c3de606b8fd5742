"""A text source as a user would add one: a section, a class, a line in ``SOURCES``."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from typing import Literal
from unittest import mock

from pydantic import Field

from megastable.config import DataConfig, MegastableConfig, RunConfig
from megastable.config import section as sections
from megastable.config.data import SourceSection
from megastable.config.section import Section
from megastable.core.errors import UserError
from megastable.data.sources import SOURCES, SourceKind


class CountingSourceConfig(Section):
    """Documents that count from a first number on, one number a document."""

    type: Literal["counting"] = Field(description="Numbers, one document each.")
    num_documents: int = Field(description="How many documents.")
    size_is_known: bool = Field(default=True, description="Whether the size is known without reading.")


class CountingDocuments:
    """The documents of a ``CountingSourceConfig``."""

    def __init__(self, spec: CountingSourceConfig) -> None:
        if spec.num_documents == 0:
            raise UserError("megastable.data.source.num_documents: 0 documents are no text")
        self.name = f"numbers up to {spec.num_documents}"
        self._spec = spec

    def __len__(self) -> int:
        return self._spec.num_documents

    def __getitem__(self, index: int) -> str:
        return f"{index} is followed by {index + 1}. " * 3

    def num_bytes(self) -> int | None:
        if not self._spec.size_is_known:
            return None
        return sum(len(self[index].encode()) for index in range(len(self)))

    def remarks(self) -> Sequence[str]:
        return ()

    def fingerprint(self) -> str:
        return hashlib.sha256(str(self._spec.num_documents).encode()).hexdigest()


@contextlib.contextmanager
def counting_source_registered(may_download: bool = False) -> Iterator[None]:
    """Add the source to the registry and its section to the schema, and take both out again."""
    kind = SourceKind(CountingDocuments, may_download)
    with mock.patch.dict(SOURCES, {"counting": kind}), data_section_added(SourceSection, CountingSourceConfig):
        yield


@contextlib.contextmanager
def data_section_added(base: type[Section], section: type[Section]) -> Iterator[None]:
    """Let ``section`` be one of the kinds of ``base``.

    A user writes ``class CountingSourceConfig(SourceSection)``. A subclass would stay for the whole process, where
    other tests list the kinds that the product has.
    """
    own_kinds = sections.kinds_of

    def kinds_of(asked: type[Section]) -> tuple[type[Section], ...]:
        return (*own_kinds(asked), section) if asked is base else own_kinds(asked)

    try:
        with mock.patch.object(sections, "kinds_of", kinds_of):
            rebuild_schema()
            yield
    finally:
        rebuild_schema()


def rebuild_schema() -> None:
    """Read the kinds of sections anew: a process that adds one after the schema was built has to."""
    # From the inside out: a section's validator holds those of the sections in it.
    for section in (DataConfig, MegastableConfig, RunConfig):
        section.model_rebuild(force=True)
