"""Builds a pair of Megatron's indexed format from documents, beside which its tokenizer and its record lie."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from filelock import FileLock, Timeout

from megastable.core.errors import UserError
from megastable.core.flush import flush_to_disk
from megastable.data.beside import meta_path, tokenizer_path
from megastable.data.corpus import SplitDocuments, note_remarks
from megastable.data.indexed_format import index_path, tokens_path
from megastable.data.indexed_writer import checksums_path
from megastable.data.progress import note
from megastable.data.prompts import Document, is_empty
from megastable.data.sample_order import validation_documents
from megastable.data.sources import DocumentSource
from megastable.data.token_store import (
    META_FILE,
    TOKENIZER_FOLDER,
    TRAIN,
    VALIDATION,
    TokenStoreMeta,
    read_meta,
)
from megastable.data.token_writer import finished_documents, save_beside, write_token_store
from megastable.data.tokenizer_interface import TextTokenizer

IDENTITY_FILE, FINISHED_FILE = "identity", "finished"
BROKEN_FILE, EMPTY_FILE = "broken.jsonl", "empty.jsonl"


@runtime_checkable
class Placed(Protocol):
    """Documents that know where they stand."""

    def place(self, index: int) -> str:
        """Return the file of a document, and its line or row there."""
        ...


@dataclass(frozen=True)
class Built:
    """What was built."""

    prefix: Path
    validation_prefix: Path | None
    """None where no document is for validation."""
    meta: TokenStoreMeta
    broken: Sequence[str]
    """The fault of every document that could not be read, with its place."""

    @property
    def num_empty_documents(self) -> int:
        """Count the documents that were read and have no text."""
        return self.meta.num_empty_documents - len(self.broken)


def broken_path(prefix: Path) -> Path:
    """Return the list of documents that could not be read."""
    return prefix.with_name(f"{prefix.name}.broken.jsonl")


def empty_path(prefix: Path) -> Path:
    """Return the list of documents that have no text."""
    return prefix.with_name(f"{prefix.name}.empty.jsonl")


def validation_prefix(prefix: Path) -> Path:
    """Return the pair of the documents that are kept for validation."""
    return prefix.with_name(f"{prefix.name}.validation")


def build_pair(
    source: DocumentSource,
    tokenizer: TextTokenizer,
    prefix: Path,
    *,
    has_prompts: bool = False,
    validation_fraction: float,
    skip_broken: bool,
    num_workers: int,
    show_progress: bool,
    options: Sequence[str] = (),
    reworded: Callable[[str], str] = str,
) -> Built:
    """Tokenise all documents into ``prefix.bin`` and ``prefix.idx``.

    The files appear when all is written. A build that was ended goes on, at the next call with the same documents,
    after those that are on disk.

    Args:
        has_prompts: whether the documents are prompts with completions.
        skip_broken: leave out documents that cannot be read, and list them; otherwise the first one is an error.
        num_workers: processes that encode; 0 encodes here.
        options: how the source was opened, such as the column of the text: what decides the documents and is not in
            the fingerprint of the source.
        reworded: puts the names that the user knows into the fault of a document, for the list.

    Raises:
        UserError: files of this name exist or are being built, or a document cannot be read.
    """
    folder = prefix.with_name(f"{prefix.name}.building")
    try:
        # Before anything is written, so that a call that is refused leaves nothing behind.
        _refuse_existing(prefix, folder, validation_fraction)
        identity = _identity(
            source.fingerprint(), _hash_of(tokenizer), str(validation_fraction), str(skip_broken), *options
        )
        note_remarks(source, show=show_progress)
        prefix.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock", timeout=0):
            # Asked again: the process that held the lock before may have built it.
            _refuse_existing(prefix, folder, validation_fraction)
            if (folder / FINISHED_FILE).exists():
                _refuse_other(prefix, folder, identity)
            else:
                _begin(folder, identity, show_progress)
                is_validation = validation_documents(len(source), validation_fraction)
                documents = _ReadableDocuments(source, is_validation, folder, skip_broken, reworded)
                write_token_store(
                    folder,
                    documents,
                    tokenizer,
                    show_progress=show_progress,
                    num_workers=num_workers,
                    has_prompts=has_prompts,
                )
                (folder / FINISHED_FILE).touch()
            built = _publish(folder, prefix)
        Path(f"{folder}.lock").unlink(missing_ok=True)
    except Timeout as error:
        raise UserError(f"another process is building {prefix}; wait for it, or name another output") from error
    except OSError as error:
        raise UserError(f"{prefix} cannot be written ({error.strerror or error})") from error
    return built


def _refuse_existing(prefix: Path, folder: Path, validation_fraction: float) -> None:
    """Refuse files of the names that are to be written, unless a finished build was ended while it moved them there."""
    if (folder / FINISHED_FILE).exists():
        return
    pair = (index_path, tokens_path, checksums_path)
    targets = [path_of(prefix) for path_of in (*pair, meta_path, tokenizer_path, broken_path, empty_path)]
    if validation_fraction:
        targets += [path_of(validation_prefix(prefix)) for path_of in pair]
    for path in targets:
        if path.exists():
            raise UserError(f"{path} exists, and nothing is overwritten; remove it, or name another output")


def _hash_of(tokenizer: TextTokenizer) -> str:
    with TemporaryDirectory() as folder:
        return save_beside(Path(folder), tokenizer)


def _identity(*parts: str) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _refuse_other(prefix: Path, folder: Path, identity: str) -> None:
    """Refuse to give the name of this build to a finished one whose files are not in their places yet."""
    path = folder / IDENTITY_FILE
    if not path.exists() or path.read_text() != identity:
        raise UserError(
            f"{folder} holds a finished build of other documents or options, not yet moved to {prefix}; "
            "run its own line again to move them, or remove that folder"
        )


def _begin(folder: Path, identity: str, show_progress: bool) -> None:
    """Make the folder, empty unless it has a part of the same build."""
    path = folder / IDENTITY_FILE
    if path.exists() and path.read_text() == identity:
        return
    if finished_documents(folder):
        note("Building anew: the documents or options have changed since the build that was ended", show=show_progress)
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir()
    path.write_text(identity)


class _ReadableDocuments(Sequence[tuple[Document, bool]]):
    """Documents of which those without text are listed, as are those that cannot be read, which have none then."""

    def __init__(
        self,
        source: DocumentSource,
        is_validation: npt.NDArray[np.bool_],
        folder: Path,
        skip_broken: bool,
        reworded: Callable[[str], str],
    ) -> None:
        """Go on with the lists of an earlier build, as far as its documents are on disk."""
        self._source = source
        self._documents = SplitDocuments(source, is_validation)
        self._skip_broken = skip_broken
        self._reworded = reworded
        self._broken_path = folder / BROKEN_FILE
        self._empty_path = folder / EMPTY_FILE
        finished = finished_documents(folder)
        for path in (self._broken_path, self._empty_path):
            kept = [line for line in _listed(path) if line["document"] < finished]
            path.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")

    def __len__(self) -> int:
        return len(self._documents)

    def __getitem__(self, index: Any) -> Any:
        try:
            document, is_validation = self._documents[index]
        except UserError as error:
            if not self._skip_broken:
                raise
            _list(self._broken_path, {"document": index, "fault": self._reworded(str(error))})
            return "", False
        if is_empty(document):
            place = {"place": self._source.place(index)} if isinstance(self._source, Placed) else {}
            _list(self._empty_path, {"document": index, **place})
        return document, is_validation


def _list(path: Path, line: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def _listed(path: Path) -> list[dict[str, Any]]:
    """Read a list of documents; a last line that a kill has cut is of a document that is read again."""
    lines = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in lines[: lines.rfind("\n") + 1].splitlines()]


def _publish(folder: Path, prefix: Path) -> Built:
    """Move what was built to its place, the indices last: a pair that has one is whole."""
    record = folder / META_FILE
    meta = read_meta(record if record.exists() else meta_path(prefix))
    broken = _listed(folder / BROKEN_FILE) or _listed(broken_path(prefix))
    moves = {folder / META_FILE: meta_path(prefix), folder / TOKENIZER_FOLDER: tokenizer_path(prefix)}
    for listed, path_of in ((BROKEN_FILE, broken_path), (EMPTY_FILE, empty_path)):
        if _listed(folder / listed):
            moves[folder / listed] = path_of(prefix)
    pairs = {folder / TRAIN: prefix}
    held_out = None
    if meta.num_validation_tokens:
        held_out = validation_prefix(prefix)
        pairs[folder / VALIDATION] = held_out
    for path_of in (tokens_path, checksums_path, index_path):
        moves |= {path_of(source): path_of(target) for source, target in pairs.items()}
    for source in moves:
        if source.is_file():
            flush_to_disk(source)
    for source, target in moves.items():
        # An earlier call may have been ended in the midst of this.
        if source.exists():
            os.rename(source, target)
    shutil.rmtree(folder)
    return Built(prefix, held_out, meta, [line["fault"] for line in broken])
