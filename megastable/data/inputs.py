"""Documents that a command line names: a path, whose format follows from its name or is given."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from megastable.config import HfSourceConfig, JsonlSourceConfig, TextSourceConfig
from megastable.core.errors import UserError
from megastable.core.user_paths import expanded
from megastable.data.corpus import read_document
from megastable.data.hf_rows import is_saved_dataset, open_hf, open_tables
from megastable.data.json_lines import SUFFIXES as JSONL_SUFFIXES
from megastable.data.json_lines import JsonLines
from megastable.data.prompts import Document
from megastable.data.sources import DocumentSource
from megastable.data.text_files import find_files, open_text, with_text

TEXT_KEY, SPLIT = "text", "train"


class Input(NamedTuple):
    """What a command line says of its documents."""

    path: str
    text_key: str | None = None
    """Key of a JSON line, or column of a table, that holds the text; None takes "text"."""
    name: str | None = None
    """Configuration of a dataset that has several."""
    split: str | None = None
    """Split of a dataset; None takes "train"."""
    prompt_key: str | None = None
    completion_key: str | None = None
    """Keys of JSON lines with prompts and completions in place of one text."""
    skip_broken: bool = False
    """Whether what cannot be read is left out."""


class Format(NamedTuple):
    """A format of documents: how it is opened, and which names its files have."""

    open: Callable[[Input], DocumentSource]
    keys: frozenset[str] = frozenset()
    """What it reads of an ``Input`` beside the path."""
    suffixes: tuple[str, ...] = ()
    reads_in_order: bool = False


def _open_text(given: Input) -> DocumentSource:
    return open_text(TextSourceConfig(type="text", path=given.path))


def _open_json_lines(given: Input) -> DocumentSource:
    return JsonLines(
        JsonlSourceConfig(
            type="jsonl",
            path=given.path,
            text_key=given.text_key or TEXT_KEY,
            prompt_key=given.prompt_key,
            completion_key=given.completion_key,
        ),
        skips_damage=given.skip_broken,
    )


def _open_dataset(given: Input) -> DocumentSource:
    return open_hf(
        HfSourceConfig(
            type="hf",
            path=given.path,
            name=given.name,
            split=given.split or SPLIT,
            text_column=given.text_key or TEXT_KEY,
        )
    )


def _open_tables(given: Input, file_format: str) -> DocumentSource:
    suffixes = FORMATS[file_format].suffixes
    found = find_files(
        given.path, lambda file: file.name.endswith(suffixes), f"files whose names do not end in {', '.join(suffixes)}"
    )
    found = with_text(found, given.path)
    return open_tables(found.files, file_format, given.path, given.text_key or TEXT_KEY, found.remarks)


OPTIONS = {
    "text_key": "--text-key",
    "prompt_key": "--prompt-key",
    "completion_key": "--completion-key",
    "name": "--name",
    "split": "--split",
}
"""What a command line calls the parts of an ``Input`` that not all formats read."""
_COLUMN = frozenset({"text_key"})
FORMATS: Mapping[str, Format] = {
    "text": Format(_open_text, suffixes=(".txt", ".md")),
    "jsonl": Format(
        _open_json_lines, _COLUMN | {"prompt_key", "completion_key"}, suffixes=JSONL_SUFFIXES, reads_in_order=True
    ),
    "parquet": Format(partial(_open_tables, file_format="parquet"), _COLUMN, (".parquet",)),
    "arrow": Format(partial(_open_tables, file_format="arrow"), _COLUMN, (".arrow",)),
    "csv": Format(partial(_open_tables, file_format="csv"), _COLUMN, (".csv",)),
    "dataset": Format(_open_dataset, _COLUMN | {"name", "split"}),
}
"""Formats by the name that a command line gives them; "dataset" is what load_from_disk or load_dataset opens."""


def format_of(path: str) -> str:
    """Tell the format of a file, folder, glob or dataset by the names of files.

    Raises:
        UserError: a folder has files of several formats.
    """
    named = [name for name, each in FORMATS.items() if path.endswith(each.suffixes)] if Path(path).suffix else []
    here = expanded(path)
    if here.is_dir():
        return _format_of_folder(here, path)
    if named:
        return named[0]
    # What is neither here nor looks like a path is the name of a dataset on the hub.
    looks_like_a_path = here.exists() or here.is_absolute() or path.startswith(".") or any(c in path for c in "*?[")
    return "text" if looks_like_a_path else "dataset"


def _format_of_folder(folder: Path, path: str) -> str:
    if is_saved_dataset(folder):
        return "dataset"
    counts: Counter[str] = Counter()
    for file in folder.rglob("*"):
        if file.is_file() and not file.name.startswith("."):
            counts.update(name for name, each in FORMATS.items() if each.suffixes and file.name.endswith(each.suffixes))
    tables = [name for name in counts if name != "text"]
    if len(tables) > 1:
        raise UserError(f"{path} has files of several formats ({', '.join(sorted(tables))}); choose one with --format")
    return tables[0] if tables else "text"


class OpenInput(NamedTuple):
    """The documents of a command line."""

    documents: DocumentSource
    reads_in_order: bool
    """Whether going back takes long."""
    options: Sequence[str]
    """The format and all that was said of how to read it: other ones, other documents."""


def open_input(given: Input, file_format: str | None) -> OpenInput:
    """Open the documents that a command line names.

    Args:
        file_format: one of ``FORMATS``; None chooses by the names of files.

    Raises:
        UserError: there are none, or they cannot be opened.
    """
    name = file_format or format_of(given.path)
    _refuse_unread(given, name)
    if (given.prompt_key is None) != (given.completion_key is None):
        raise UserError("--prompt-key and --completion-key go together")
    if given.prompt_key is not None and given.text_key is not None:
        raise UserError("--text-key: does not go with --prompt-key, which is read in its place")
    chosen = FORMATS[name]
    options = [name, *(str(option) for option in given[1:])]
    return OpenInput(chosen.open(given), chosen.reads_in_order, options)


def _refuse_unread(given: Input, name: str) -> None:
    """Refuse what was said of documents of another format than theirs."""
    for key, option in OPTIONS.items():
        if getattr(given, key) is not None and key not in FORMATS[name].keys:
            legal = ", ".join(other for other, each in FORMATS.items() if key in each.keys)
            raise UserError(
                f"{option}: is for {legal}, and {given.path} is read as {name}; leave it out, or see --format"
            )


class ReadableDocuments:
    """Documents of which those that cannot be read are counted, and have no text."""

    def __init__(self, documents: DocumentSource) -> None:
        """Wrap open documents."""
        self._documents = documents
        self.name = documents.name
        self.broken: list[str] = []

    def __len__(self) -> int:
        return len(self._documents)

    def __getitem__(self, index: int) -> Document:
        try:
            return read_document(self._documents, index)
        except UserError as error:
            self.broken.append(str(error))
            return ""

    def num_bytes(self) -> int | None:
        """Return the size of all documents, as far as it is known."""
        return self._documents.num_bytes()

    def remarks(self) -> Sequence[str]:
        """Return lines on what was left out before."""
        return self._documents.remarks()

    def fingerprint(self) -> str:
        """Return a hash of the documents."""
        return self._documents.fingerprint()
