"""The rows of a Hugging Face dataset as documents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megastable.config import HfSourceConfig
from megastable.core.errors import UserError, first_line
from megastable.core.user_paths import expanded


class HfRows:
    """One document a row of a Hugging Face dataset."""

    def __init__(self, spec: HfSourceConfig) -> None:
        """Open the dataset, which is downloaded where it is not on this machine.

        Raises:
            UserError: the dataset cannot be opened, has no row, or has no such split or text column.
        """
        self.name = spec.path
        self._column = spec.text_column
        rows = _load(spec)
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
        try:
            text = self._rows[index][self._column]
        except Exception as error:  # whatever decoding a column of any type may raise
            raise UserError(
                f"megastable.data.source.text_column: row {index:,} of {self.name} cannot be read ({first_line(error)})"
            ) from error
        if not isinstance(text, str):
            raise UserError(
                f"megastable.data.source.text_column: row {index:,} of {self.name} holds {type(text).__name__}, "
                f"not text, in the column {self._column!r}"
            )
        return text

    def num_bytes(self) -> None:
        """Return None: a dataset's recorded size counts all its splits and columns, as Arrow stores them."""

    def remarks(self) -> Sequence[str]:
        """Return nothing: every row is a document."""
        return ()

    def fingerprint(self) -> str:
        """Return the library's own hash of the data files and of what was done to them."""
        return self._fingerprint


def _load(spec: HfSourceConfig) -> Any:
    """Open the ``datasets.Dataset`` of the one split that ``spec`` names."""
    # Imported here, because it takes a second that other sources need not spend.
    from datasets import Dataset, DatasetDict, load_dataset, load_from_disk

    path = expanded(spec.path)
    what = f"datasets cannot open {spec.path} (name {spec.name!r}, split {spec.split!r})"
    try:
        # save_to_disk leaves one of these files; anything else is for load_dataset, be it a folder or a name.
        if any((path / mark).is_file() for mark in ("state.json", "dataset_dict.json")):
            rows = load_from_disk(str(path))
        else:
            rows = load_dataset(str(path), spec.name, split=spec.split)
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
