"""Where documents come from.

To add a source: its section in ``config/data.py``, a function or class here that opens it as a ``DocumentSource``, and
a line in ``SOURCES``. Nothing else asks of which class a source is.
"""

from __future__ import annotations

import glob
import hashlib
import os
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megastable.config import HfSourceConfig, SourceConfig, StdlibSourceConfig, TextSourceConfig
from megastable.core.errors import UserError
from megastable.core.user_paths import expanded

NOT_LIBRARY_CODE = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"})
"""Folders under the standard library that hold other packages, tests, or what some distributions leave out."""


class DocumentSource(Protocol):
    """Documents in a fixed order, each read when it is asked for."""

    @property
    def name(self) -> str:
        """Return what a message calls this source: its path."""
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

    def fingerprint(self) -> str:
        """Return a hash that changes whenever the documents do, as far as it can be known without reading them all.

        It decides which tokenised corpus of the cache belongs to the source.
        """
        ...


class TextFiles:
    """One document a file, UTF-8, in the order of the names relative to ``root``. Empty files are left out."""

    def __init__(self, root: Path, files: Sequence[Path], name: str) -> None:
        """Take the files that have text, in order.

        Raises:
            UserError: no file is left.
        """
        self.name = name
        self._root = root
        self._files = sorted(
            (file for file in files if file.stat().st_size > 0), key=lambda file: file.relative_to(root).parts
        )
        if not self._files:
            raise UserError(f"megastable.data.source.path: {name} has no text: there is no file, or all are empty")

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> str:
        file = self._files[index]
        try:
            return file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise UserError(
                f"megastable.data.source.path: {file} is not UTF-8 text (byte {error.start:,}); "
                "convert it, or name the text files alone with a glob such as folder/**/*.txt"
            ) from error
        except OSError as error:
            raise UserError(f"megastable.data.source.path: {file} cannot be read ({error.strerror})") from error

    def num_bytes(self) -> int:
        """Return the size of all files together."""
        return sum(file.stat().st_size for file in self._files)

    def fingerprint(self) -> str:
        """Hash every file's name, size and time of change: to read terabytes to find them unchanged takes too long."""
        digest = hashlib.sha256()
        for file in self._files:
            status = file.stat()
            digest.update(f"{file.relative_to(self._root)}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
        return digest.hexdigest()


def _open_stdlib(_: StdlibSourceConfig) -> TextFiles:
    """Open the source code of the Python that runs this."""
    root = Path(sysconfig.get_path("stdlib"))
    files: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        # Assigned in place, so that the walk stays out of them: site-packages can hold 100,000 files.
        subfolders[:] = [name for name in subfolders if name not in NOT_LIBRARY_CODE]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return TextFiles(root, files, name=str(root))


def _open_text(spec: TextSourceConfig) -> TextFiles:
    """Open a file, a folder with all its subfolders, or what a glob matches."""
    path = expanded(spec.path)
    # What exists is meant by its own name, even where the name has a bracket or star in it.
    if path.is_file():
        return TextFiles(path.parent, [path], name=spec.path)
    if path.is_dir():
        return TextFiles(path, [file for file in path.rglob("*") if _is_document(file, path)], name=spec.path)
    matches = [Path(match) for match in glob.glob(str(path), recursive=True)]
    if not matches:
        what = "matches no file" if glob.has_magic(spec.path) else "does not exist"
        raise UserError(f"megastable.data.source.path: {spec.path} {what}; legal are a file, a folder or a glob")
    # Matches of one glob may lie anywhere, so their names count from the top.
    root = Path(path.anchor)
    return TextFiles(root, [file for file in matches if file.is_file()], name=spec.path)


def _is_document(file: Path, root: Path) -> bool:
    """Tell whether a file is a document, which those of version control and editors, all hidden, are not."""
    return file.is_file() and not any(part.startswith(".") for part in file.relative_to(root).parts)


class HfRows:
    """One document a row of a Hugging Face dataset."""

    def __init__(self, spec: HfSourceConfig) -> None:
        """Open the dataset, which is downloaded where it is not on this machine.

        Raises:
            UserError: the dataset cannot be opened or has no such split or text column.
        """
        self.name = spec.path
        self._column = spec.text_column
        rows = _load_hf(spec)
        if spec.text_column not in rows.column_names:
            raise UserError(
                f"megastable.data.source.text_column: {spec.path} has no column {spec.text_column!r}; "
                f"its columns are {', '.join(rows.column_names)}"
            )
        # Taken before the other columns are dropped: the fingerprint counts what was done to the rows, and that of the
        # columns kept names caches that exist already.
        self._fingerprint = str(rows._fingerprint)
        self._rows = rows.select_columns([spec.text_column])

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> str:
        text = self._rows[index][self._column]
        if not isinstance(text, str):
            raise UserError(
                f"megastable.data.source.text_column: row {index:,} of {self.name} holds {type(text).__name__}, "
                f"not text, in the column {self._column!r}"
            )
        return text

    def num_bytes(self) -> None:
        """Return None: a dataset's recorded size counts all its splits and columns, as Arrow stores them."""

    def fingerprint(self) -> str:
        """Return the library's own hash of the data files and of what was done to them."""
        return self._fingerprint


def _load_hf(spec: HfSourceConfig) -> Any:
    """Open the ``datasets.Dataset`` of the one split that ``spec`` names."""
    # Imported here, because it takes a second that other sources need not spend.
    from datasets import DatasetDict, load_dataset, load_from_disk
    from datasets.exceptions import DatasetsError

    path = expanded(spec.path)
    try:
        # save_to_disk leaves one of these files; anything else is for load_dataset, be it a folder or a name.
        if not any((path / mark).is_file() for mark in ("state.json", "dataset_dict.json")):
            return load_dataset(str(path), spec.name, split=spec.split)
        saved = load_from_disk(str(path))
    except (DatasetsError, OSError, ValueError, IndexError) as error:
        # An IndexError is that of a dataset that was saved without a row.
        raise UserError(
            f"megastable.data.source.path: datasets cannot open {spec.path} "
            f"(name {spec.name!r}, split {spec.split!r}): {error}"
        ) from error
    if not isinstance(saved, DatasetDict):
        return saved
    if spec.split not in saved:
        raise UserError(
            f"megastable.data.source.split: {spec.path} has no split {spec.split!r}; its splits are {', '.join(saved)}"
        )
    return saved[spec.split]


@dataclass(frozen=True)
class SourceKind:
    """What is known of a type of source before one is opened."""

    open: Callable[[Any], DocumentSource]
    """Opens the source that a section of the run file describes; a UserError says why it cannot be opened."""
    may_download: bool = False
    """Whether opening may fetch documents over the network, which a check of the run file must not do."""


SOURCES: dict[str, SourceKind] = {
    "stdlib": SourceKind(_open_stdlib),
    "text": SourceKind(_open_text),
    "hf": SourceKind(HfRows, may_download=True),
}
"""Kinds of sources, by the ``type`` of their section of the run file."""


def open_source(spec: SourceConfig) -> DocumentSource:
    """Open the documents that ``spec`` names.

    Raises:
        UserError: the source is not there or has no document.
    """
    return SOURCES[spec.type].open(spec)
