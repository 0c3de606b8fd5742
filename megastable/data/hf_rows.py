"""The rows of a Hugging Face dataset as documents: from a copy on disk, or as a stream."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from megastable.config import HfSourceConfig
from megastable.core.errors import UserError, first_line
from megastable.core.user_paths import expanded


def open_hf(spec: HfSourceConfig) -> HfRows | HfStream:
    """Open a dataset, as a stream where the section says how many rows to read.

    Raises:
        UserError: it cannot be opened, has no row, or has no such split or text column.
    """
    if spec.stream_rows is not None:
        return HfStream(spec, spec.stream_rows)
    return HfRows(_load(spec), spec.path, spec.text_column)


def open_tables(files: Sequence[Path], file_format: str, name: str, column: str, remarks: Sequence[str] = ()) -> HfRows:
    """Open files of a format that the library reads, such as parquet, as one dataset.

    Args:
        remarks: lines that tell the user which files were left out before.

    Raises:
        UserError: they cannot be read, have no row or no such column.
    """
    from datasets import load_dataset

    try:
        # As the text that stands there: by itself the reader of csv makes numbers of digits, and nothing of "NA".
        options = {"keep_default_na": False, "converters": {column: str}} if file_format == "csv" else {}
        rows = load_dataset(file_format, data_files=[str(file) for file in files], split="train", **options)
    except Exception as error:
        why = first_line(error.__cause__ or error)
        raise UserError(f"megastable.data.source.path: datasets cannot read {name} as {file_format}: {why}") from error
    if len(rows) == 0:
        raise UserError(f"megastable.data.source.path: {name} has no rows")
    return HfRows(rows, name, column, remarks)


class HfRows:
    """One document a row of a Hugging Face dataset."""

    def __init__(self, rows: Any, name: str, column: str, remarks: Sequence[str] = ()) -> None:
        """Take the rows of an open dataset.

        Raises:
            UserError: it has no such column.
        """
        self.name = name
        self._remarks = tuple(remarks)
        self._column = column
        _check_column(name, column, rows.column_names)
        # Taken before the other columns are dropped: the fingerprint counts what was done to the rows, and that of the
        # columns kept names caches that exist already.
        self._fingerprint = str(rows._fingerprint)
        self._rows = rows.select_columns([column])

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> str:
        try:
            text = self._rows[index][self._column]
        except Exception as error:  # whatever decoding a column of any type may raise
            raise UserError(
                f"megastable.data.source.text_column: row {index:,} of {self.name} cannot be read ({first_line(error)})"
            ) from error
        return _as_text(text, index, self.name, self._column)

    def num_bytes(self) -> None:
        """Return None: a dataset's recorded size counts all its splits and columns, as Arrow stores them."""

    def remarks(self) -> Sequence[str]:
        """Say which files were left out: every row of the others is a document."""
        return self._remarks

    def place(self, index: int) -> str:
        """Return where a document stands, for a report."""
        return f"row {index:,} of {self.name}"

    def fingerprint(self) -> str:
        """Return the library's own hash of the data files and of what was done to them."""
        return self._fingerprint


class HfStream:
    """One document a row of a Hugging Face dataset that is read as it comes, the first rows of it.

    What is read is tokenised into the cache as any other text, so a run that goes on needs the stream no more.
    """

    def __init__(self, spec: HfSourceConfig, num_rows: int) -> None:
        """Look at the dataset and at its first row.

        Raises:
            UserError: the dataset cannot be opened, has no row, or has no such split or text column.
        """
        self.name = spec.path
        self._num_rows = num_rows
        self._column = spec.text_column
        self._stream, self._fingerprint = _open_stream(spec)
        self._rows: Iterator[Any] = iter(())
        self._rows_read = num_rows
        # Not all streams know their columns before a row is read.
        _check_column(self.name, self._column, list(self._row(0)))

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, index: int) -> str:
        """Read a row; a later one than the last costs the rows between, an earlier one all rows up to it."""
        if not 0 <= index < self._num_rows:
            raise IndexError(f"row {index} of {self._num_rows}")
        return _as_text(self._row(index).get(self._column), index, self.name, self._column)

    def num_bytes(self) -> None:
        """Return None: nobody knows before the rows are read."""

    def remarks(self) -> Sequence[str]:
        """Return nothing: every row is a document."""
        return ()

    def fingerprint(self) -> str:
        """Hash what the library knows of the data files, such as their version on the hub, and the number of rows."""
        return hashlib.sha256(f"{self._fingerprint} {self._num_rows}".encode()).hexdigest()

    def _row(self, index: int) -> dict[str, Any]:
        try:
            if index < self._rows_read:
                self._rows = iter(self._stream)
                self._rows_read = 0
            row: dict[str, Any] | None = next(islice(self._rows, index - self._rows_read, None), None)
        except Exception as error:  # of the network, and of files of any format
            raise UserError(
                f"megastable.data.source.path: row {index:,} of {self.name} cannot be read "
                f"({first_line(error.__cause__ or error)})"
            ) from error
        if row is None:
            raise UserError(
                f"megastable.data.source.stream_rows: {self._num_rows:,}, but {self.name} ends before it has row "
                f"{index:,} (counting from 0); legal is no more rows than it has"
            )
        self._rows_read = index + 1
        return row


def _check_column(name: str, column: str, columns: Sequence[str]) -> None:
    if column not in columns:
        raise UserError(
            f"megastable.data.source.text_column: {name} has no column {column!r}; its columns are {', '.join(columns)}"
        )


def _as_text(value: Any, index: int, name: str, column: str) -> str:
    # A row without a value is a document without text.
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UserError(
            f"megastable.data.source.text_column: row {index:,} of {name} holds {type(value).__name__}, "
            f"not text, in the column {column!r}"
        )
    return value


def _open_stream(spec: HfSourceConfig) -> tuple[Any, str]:
    """Open a ``datasets.IterableDataset``, and return it with a name of the state that its files are in."""
    from datasets import load_dataset_builder

    path = expanded(spec.path)
    if is_saved_dataset(path):
        rows = _load(spec)
        return rows.to_iterable_dataset(), str(rows._fingerprint)
    try:
        builder = load_dataset_builder(str(path), spec.name)
        files = builder.config.data_files or {}
        # Of files on the hub the version, of those here the time of change.
        state = {str(split): [str(mark) for mark in found.origin_metadata] for split, found in files.items()}
        return builder.as_streaming_dataset(split=spec.split), f"{builder.hash} {spec.split} {state}"
    except Exception as error:
        raise UserError(
            f"megastable.data.source.path: datasets cannot open {spec.path} as a stream (name {spec.name!r}, split "
            f"{spec.split!r}): {first_line(error.__cause__ or error)}"
        ) from error


def is_saved_dataset(path: Path) -> bool:
    """Tell whether a folder was written by save_to_disk, which leaves one of these files."""
    return any((path / mark).is_file() for mark in ("state.json", "dataset_dict.json"))


def _load(spec: HfSourceConfig) -> Any:
    """Open the ``datasets.Dataset`` of the one split that ``spec`` names."""
    # Imported here, because it takes a second that other sources need not spend.
    from datasets import Dataset, DatasetDict, load_dataset, load_from_disk

    path = expanded(spec.path)
    what = f"datasets cannot open {spec.path} (name {spec.name!r}, split {spec.split!r})"
    try:
        # Anything else is for load_dataset, be it a folder or a name.
        rows = (
            load_from_disk(str(path))
            if is_saved_dataset(path)
            else load_dataset(str(path), spec.name, split=spec.split)
        )
    except IndexError as error:
        # The library looks for the first file of a dataset that was saved without a row.
        raise UserError(f"megastable.data.source.path: {what}: it has no data") from error
    except Exception as error:
        # Its errors are of many unrelated types: for a script, for the YAML of a broken card, for files of any format.
        # That a dataset could not be generated is all that some of them say; their cause says why.
        raise UserError(f"megastable.data.source.path: {what}: {first_line(error.__cause__ or error)}") from error
    if isinstance(rows, DatasetDict):
        if spec.split not in rows:
            splits = ", ".join(rows)
            raise UserError(
                f"megastable.data.source.split: {spec.path} has no split {spec.split!r}; its splits are {splits}"
            )
        rows = rows[spec.split]
    if not isinstance(rows, Dataset) or len(rows) == 0:
        raise UserError(f"megastable.data.source.path: {what}: it has no rows")
    return rows
