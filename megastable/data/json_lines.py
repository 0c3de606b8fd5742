"""Files of JSON lines as documents, one document a line, also compressed."""

from __future__ import annotations

import bisect
import contextlib
import gzip
import hashlib
import io
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate, islice
from pathlib import Path
from typing import BinaryIO, NoReturn, cast

from megastable.config import JsonlSourceConfig
from megastable.core.errors import UserError
from megastable.data.prompts import Document, Prompted
from megastable.data.text_files import files_fingerprint, find_files, with_text

_READ_BYTES = 1 << 20


def _open_zstd(path: Path) -> BinaryIO:
    # Arrow, which `datasets` brings: Python has zstd from 3.14 on.
    import pyarrow

    return cast(BinaryIO, io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.OSFile(str(path)), "zstd")))


def _open_gzip(path: Path) -> BinaryIO:
    return cast(BinaryIO, io.BufferedReader(gzip.open(path, "rb")))


DECOMPRESSORS: dict[str, Callable[[Path], BinaryIO]] = {".gz": _open_gzip, ".zst": _open_zstd}
"""What opens a compressed file, by the end of its name."""
SUFFIXES = (".jsonl", *(f".jsonl{suffix}" for suffix in DECOMPRESSORS))


class JsonLines:
    """One document a line, in the order of the files' names. A line without text is a document without text."""

    def __init__(self, spec: JsonlSourceConfig, *, skips_damage: bool = False) -> None:
        """Find the files; none is read.

        Args:
            skips_damage: of a file that cannot be read to its end, take the lines before, and one document that cannot
                be read in place of the rest. Otherwise to count the documents is an error.

        Raises:
            UserError: there is no such file.
        """
        self.name = spec.path
        found = find_files(spec.path, _is_json_lines, f"files whose names do not end in {', '.join(SUFFIXES)}")
        found = with_text(found, spec.path)
        self._root = found.root
        self._remarks = found.remarks
        self._files = found.files
        self._keys = [spec.text_key]
        if spec.prompt_key is not None and spec.completion_key is not None:
            self._keys = [spec.prompt_key, spec.completion_key]
        self._skips_damage = skips_damage
        # Where the last document was read, so that a later one of the same file is ahead.
        self._lines: Iterator[bytes] = iter(())
        self._opened: Path | None = None
        self._lines_read = 0

    def __len__(self) -> int:
        return self._first_lines[-1]

    def __getitem__(self, index: int) -> Document:
        """Read one document; a later one of the same file costs the lines between, any other the file up to it."""
        file, line = self._place(index)
        if file != self._opened or line < self._lines_read:
            self._lines = _lines(file)
            self._opened = file
            self._lines_read = 0
        try:
            stored = next(islice(self._lines, line - self._lines_read, None), None)
        except UserError:
            self._opened = None
            raise
        if stored is None:
            raise UserError(f"megastable.data.source.path: {file} has become shorter while it was read")
        self._lines_read = line + 1
        texts = self._texts(stored, f"{file}, line {line + 1:,}")
        return texts[0] if len(texts) == 1 else Prompted(*texts)

    def place(self, index: int) -> str:
        """Return where a document stands, for a report."""
        file, line = self._place(index)
        return f"{file}, line {line + 1:,}"

    def num_bytes(self) -> None:
        """Return None: how much of a line is text shows only when it is read."""

    def remarks(self) -> Sequence[str]:
        """Say which files of a folder were left out."""
        return self._remarks

    def fingerprint(self) -> str:
        """Hash every file's name, size and time of change."""
        digest = hashlib.sha256("".join(f"{key}\0" for key in self._keys).encode())
        digest.update(files_fingerprint(self._root, self._files).encode())
        return digest.hexdigest()

    @cached_property
    def _first_lines(self) -> list[int]:
        """Count the lines before every file, and all, which reads them: only what tokenises them asks."""
        return [0, *accumulate(self._count(file) for file in self._files)]

    def _count(self, file: Path) -> int:
        try:
            return _count_lines(file)
        except UserError:
            if not self._skips_damage:
                raise
            return _count_to_damage(file) + 1

    def _place(self, index: int) -> tuple[Path, int]:
        """Return the file of a document, and the lines before it there."""
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        file = bisect.bisect_right(self._first_lines, index) - 1
        return self._files[file], index - self._first_lines[file]

    def _texts(self, stored: bytes, place: str) -> list[str]:
        """Take the text under each key out of a line; an empty line has none."""
        key = "megastable.data.source"
        try:
            # Some tools begin a file with a byte order mark, which is no JSON.
            text = stored.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise UserError(f"{key}.path: {place} is not UTF-8 (byte {error.start:,} of the line)") from error
        if not text.strip():
            return [""] * len(self._keys)
        try:
            row = json.loads(text.strip())
        except (ValueError, RecursionError) as error:
            why = f"column {error.colno}: {error.msg}" if isinstance(error, json.JSONDecodeError) else str(error)
            raise UserError(f"{key}.path: {place} is not JSON ({why})") from error
        if not isinstance(row, dict):
            raise UserError(f"{key}.path: {place} is no JSON object but {type(row).__name__}")
        for name in self._keys:
            if name not in row:
                keys = ", ".join(repr(other) for other in list(row)[:10]) or "none"
                raise UserError(f"{key}.text_key: {place} has no key {name!r}; its keys are {keys}")
            if not isinstance(row[name], str):
                raise UserError(f"{key}.text_key: {place} holds {type(row[name]).__name__}, not text, in {name!r}")
        return [row[name] for name in self._keys]


def _is_json_lines(file: Path) -> bool:
    return file.name.endswith(SUFFIXES)


def _open(file: Path) -> BinaryIO:
    opener = DECOMPRESSORS.get(file.suffix)
    try:
        return file.open("rb") if opener is None else opener(file)
    except (OSError, ValueError) as error:
        _refuse(file, error)


def _lines(file: Path) -> Iterator[bytes]:
    """Yield the lines of a file with their line feeds."""
    with _open(file) as opened:
        lines = iter(opened)
        number = 0
        while True:
            try:
                line = next(lines, None)
            except (OSError, EOFError, zlib.error) as error:
                _refuse(file, error, f" after line {number:,}")
            if line is None:
                return
            number += 1
            yield line


def _count_lines(file: Path) -> int:
    """Count the lines of a file; the last one needs no line feed."""
    count = 0
    ends_with_line_feed = True
    with _open(file) as opened:
        while True:
            try:
                part = opened.read(_READ_BYTES)
            except (OSError, EOFError, zlib.error) as error:
                _refuse(file, error, f" after line {count:,}")
            if not part:
                return count + (not ends_with_line_feed)
            count += part.count(b"\n")
            ends_with_line_feed = part.endswith(b"\n")


def _count_to_damage(file: Path) -> int:
    """Count the lines that can be read of a file whose end cannot, as they are read later."""
    count = 0
    # What is wrong is said when the line is read.
    with contextlib.suppress(UserError):
        for _ in _lines(file):
            count += 1
    return count


def _refuse(file: Path, error: BaseException, where: str = "") -> NoReturn:
    why = getattr(error, "strerror", None) or error
    raise UserError(f"megastable.data.source.path: {file} cannot be read{where} ({why})") from error
