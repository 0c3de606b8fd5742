"""Builds a pair of Megatron's indexed format from documents, beside which its tokenizer and its record lie."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from megastable.core.errors import UserError
from megastable.data.beside import meta_path, tokenizer_path
from megastable.data.corpus import SplitDocuments
from megastable.data.indexed_format import index_path, tokens_path
from megastable.data.indexed_writer import checksums_path
from megastable.data.progress import note
from megastable.data.prompts import Document
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
from megastable.data.token_writer import finished_documents, write_token_store
from megastable.data.tokenizer_interface import TextTokenizer

IDENTITY_FILE, BROKEN_FILE, FINISHED_FILE = "identity", "broken.jsonl", "finished"


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
) -> Built:
    """Tokenise all documents into ``prefix.bin`` and ``prefix.idx``.

    The files appear when all is written. A build that was ended goes on, at the next call with the same documents,
    after those that are on disk.

    Args:
        has_prompts: whether the documents are prompts with completions.
        skip_broken: leave out documents that cannot be read, and list them; otherwise the first one is an error.
        num_workers: processes that encode; 0 encodes here.

    Raises:
        UserError: files of this name exist or are being built, or a document cannot be read.
    """
    folder = prefix.with_name(f"{prefix.name}.building")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock", timeout=0):
            if not (folder / FINISHED_FILE).exists():
                _refuse_existing(prefix, folder)
                _begin(folder, source, validation_fraction, skip_broken, show_progress)
                is_validation = validation_documents(len(source), validation_fraction)
                documents = _ReadableDocuments(SplitDocuments(source, is_validation), folder, skip_broken)
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


def _refuse_existing(prefix: Path, folder: Path) -> None:
    for path in (index_path(prefix), tokens_path(prefix), meta_path(prefix), tokenizer_path(prefix)):
        if path.exists():
            # Nothing of this build is there yet, or its folder would say that it was finished.
            shutil.rmtree(folder)
            raise UserError(f"{path} exists, and nothing is overwritten; remove it, or name another output")


def _begin(
    folder: Path, source: DocumentSource, validation_fraction: float, skip_broken: bool, show_progress: bool
) -> None:
    """Empty the folder unless it has a part of the same build."""
    parts = [source.fingerprint(), str(validation_fraction), str(skip_broken)]
    identity = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    path = folder / IDENTITY_FILE
    if path.exists() and path.read_text() == identity:
        return
    if finished_documents(folder):
        note("Building anew: the documents or options have changed since the build that was ended", show=show_progress)
    shutil.rmtree(folder)
    folder.mkdir()
    path.write_text(identity)


class _ReadableDocuments(Sequence[tuple[Document, bool]]):
    """Documents of which those that cannot be read are listed, and have no text."""

    def __init__(self, documents: SplitDocuments, folder: Path, skip_broken: bool) -> None:
        """Go on with the list of an earlier build, as far as its documents are on disk."""
        self._documents = documents
        self._skip_broken = skip_broken
        self._path = folder / BROKEN_FILE
        finished = finished_documents(folder)
        kept = [line for line in _broken(self._path) if line["document"] < finished]
        self._path.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")

    def __len__(self) -> int:
        return len(self._documents)

    def __getitem__(self, index: Any) -> Any:
        try:
            return self._documents[index]
        except UserError as error:
            if not self._skip_broken:
                raise
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"document": index, "fault": str(error)}) + "\n")
            return "", False


def _broken(path: Path) -> list[dict[str, Any]]:
    """Read the list of broken documents; a last line that a kill has cut is of a document that is read again."""
    lines = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in lines[: lines.rfind("\n") + 1].splitlines()]


def _publish(folder: Path, prefix: Path) -> Built:
    """Move what was built to its place, the indices last: a pair that has one is whole."""
    record = folder / META_FILE
    meta = read_meta(record if record.exists() else meta_path(prefix))
    broken = _broken(folder / BROKEN_FILE) or _broken(broken_path(prefix))
    moves = {folder / META_FILE: meta_path(prefix), folder / TOKENIZER_FOLDER: tokenizer_path(prefix)}
    if broken:
        moves[folder / BROKEN_FILE] = broken_path(prefix)
    pairs = {folder / TRAIN: prefix}
    held_out = None
    if meta.num_validation_tokens:
        held_out = validation_prefix(prefix)
        pairs[folder / VALIDATION] = held_out
    for path_of in (tokens_path, checksums_path, index_path):
        moves |= {path_of(source): path_of(target) for source, target in pairs.items()}
    for source, target in moves.items():
        # An earlier call may have been ended in the midst of this.
        if source.exists():
            os.rename(source, target)
    shutil.rmtree(folder)
    return Built(prefix, held_out, meta, [line["fault"] for line in broken])
