"""The checkpoints of a run folder: which there are, which are complete, and the manifest that says so.

A checkpoint is written to ``step_00000010.partial``; its manifest, with every file's size, is written last, and then
the folder is renamed. A folder without that suffix and with a manifest that its files match is complete.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megastable.core.errors import UserError

MANIFEST_NAME = "manifest.json"
PARTIAL_SUFFIX = ".partial"
DAMAGED_SUFFIX = ".damaged"
FORMAT_VERSION = 1
NAMED_FAULTS = 5
"""A damaged checkpoint may lack a file of every rank; its message names this many."""


def folder_name(step: int) -> str:
    """Return the name of a step's checkpoint: ``step_00000010`` for step 10."""
    return f"step_{step:08d}"


@dataclass(frozen=True)
class Manifest:
    """Describes a complete checkpoint; written into it last."""

    state: dict[str, int]
    """``TrainingState.to_dict()``."""
    run: dict[str, Any]
    """The run file that the checkpoint was trained with."""
    corpus_fingerprint: str
    """Hash of the tokens and their split; other data would give the consumed samples another meaning."""
    world_size: int
    versions: dict[str, str]
    files: dict[str, int]
    """File name, relative to the checkpoint, to its size in bytes."""
    monitors: dict[str, Any] = field(default_factory=dict)
    """What the run's monitors remember."""

    def write(self, folder: Path) -> None:
        """Write the manifest into ``folder`` so that it survives a power cut once this returns."""
        text = json.dumps({"format_version": FORMAT_VERSION, **self.__dict__}, indent=2)
        (folder / MANIFEST_NAME).write_text(text, encoding="utf-8")
        flush_to_disk(folder / MANIFEST_NAME, folder)


def file_sizes(folder: Path) -> dict[str, int]:
    """Map every file below ``folder`` but the manifest, by its relative name, to its size in bytes."""
    return {
        str(path.relative_to(folder)): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != MANIFEST_NAME
    }


def flush_to_disk(*paths: Path) -> None:
    """Return once files, or the names in folders, would survive a power cut."""
    # A renamed or new file is safe only when its folder is flushed, too: the name is an entry of the folder.
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def publish(partial: Path, final: Path) -> None:
    """Give a finished checkpoint its name; a damaged one of that name is moved aside."""
    if final.exists():
        aside = final.with_name(final.name + DAMAGED_SUFFIX)
        # Only the last damaged one is kept, or a rename would fail on a folder that is not empty.
        shutil.rmtree(aside, ignore_errors=True)
        os.replace(final, aside)
    os.replace(partial, final)
    flush_to_disk(final.parent)


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a complete checkpoint.

    Raises:
        UserError: ``folder`` is no checkpoint, or is not complete; the fault is named.
    """
    path = folder / MANIFEST_NAME
    if not path.is_file():
        raise UserError(f"{folder} is no complete checkpoint: it has no {MANIFEST_NAME}")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    # Any JSON may stand in a damaged file, an object as well as a number or a list.
    version = values.pop("format_version", None) if isinstance(values, dict) else None
    if version != FORMAT_VERSION:
        raise UserError(f"{path} has format version {version}; this program reads {FORMAT_VERSION}")
    # The keys are those of the dataclass: one too many or too few is refused by its constructor.
    try:
        manifest = Manifest(**values)
    except TypeError as error:
        raise UserError(f"{path} does not have the keys of a manifest: {error}") from error
    if not isinstance(manifest.files, dict):
        raise UserError(f"{path} does not list its files")
    # Sizes, not hashes: a copy or write that was cut short shows in them, and terabytes are not read to find it.
    present = file_sizes(folder)
    wrong = [name for name, size in manifest.files.items() if present.get(name) != size]
    if wrong:
        named = ", ".join(wrong[:NAMED_FAULTS])
        raise UserError(f"{folder} is damaged: {named} missing or of another size than was written")
    return manifest


def newest_complete(checkpoints: Path, warn: Callable[[str], None]) -> Path | None:
    """Find the complete checkpoint of the highest step; damaged ones are passed over with a warning."""
    for folder in sorted(step_folders(checkpoints), key=_step_of, reverse=True):
        try:
            read_manifest(folder)
        except UserError as error:
            warn(f"{error}; falling back to an older checkpoint")
            continue
        return folder
    return None


def step_folders(checkpoints: Path) -> list[Path]:
    """List all published checkpoint folders, complete or not, in no particular order."""
    if not checkpoints.is_dir():
        return []
    # Eight digits or more: names ending in .partial or .damaged are not published.
    return [path for path in checkpoints.iterdir() if path.is_dir() and re.fullmatch(r"step_\d{8,}", path.name)]


def _step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step_"))
