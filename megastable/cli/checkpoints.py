"""The checkpoints of a run, for people and as JSON."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.text import Text

from megastable.checkpoints.folder import Kind
from megastable.checkpoints.listing import Found, look_at, newest_complete_of, paths_to_look_at, verified
from megastable.cli.tables import ABSENT, LEAST_WIDTH, as_json, duration, make_table, size, whole, wide_console
from megastable.core.errors import shown
from megastable.training.metrics import finite_or_none

KINDS: dict[Kind, str] = {
    "checkpoint": "not whole",
    "partial": "unfinished",
    "damaged": "set aside as damaged",
    "superseded": "about to be replaced",
    "abandoned": "gone back from",
    "deleting": "half deleted",
    "other": "no checkpoint",
}
"""What a folder is that is no complete checkpoint."""


def print_checkpoints(path: Path, verify: bool, json_wanted: bool) -> bool:
    """Print what lies in a run's folder of checkpoints; return whether every checkpoint that was verified is whole.

    Args:
        verify: read all files and compare them with their checksums.

    Raises:
        UserError: ``path`` is neither a run folder, nor a folder of checkpoints, nor one of them.
    """
    found = [look_at(entry) for entry in paths_to_look_at(path)]
    if verify:
        found = _verified(found)
    if json_wanted:
        print(as_json(_document(path, found)))
    else:
        _print_table(path, found)
    return not any(entry.is_verified and entry.faults for entry in found)


def _verified(found: Sequence[Found]) -> list[Found]:
    # Of leftovers nothing is expected, unless one is asked about by its name.
    is_asked = {entry.path for entry in found if entry.kind == "checkpoint" or len(found) == 1}
    total_bytes = sum(entry.size_bytes for entry in found if entry.path in is_asked)
    # On standard error, so that JSON is all there is on standard output.
    console = Console(stderr=True)
    columns = (TextColumn("reading"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("", total=total_bytes)
        return [
            verified(entry, lambda read_bytes: progress.advance(task, read_bytes)) if entry.path in is_asked else entry
            for entry in found
        ]


def _document(path: Path, found: Sequence[Found]) -> dict[str, Any]:
    newest = newest_complete_of(found)
    return {
        "path": str(path),
        "newest_complete": None if newest is None else newest.path.name,
        "checkpoints": [_values(entry) for entry in found],
    }


def _values(found: Found) -> dict[str, Any]:
    values: dict[str, Any] = {
        "name": found.path.name,
        "kind": found.kind,
        "step": found.step,
        "complete": found.is_complete,
        "verified": found.is_verified,
        "faults": list(found.faults),
        "bytes": found.size_bytes,
        "written_unix": found.written_unix,
        "age_seconds": None if found.written_unix is None else _age_seconds(found.written_unix),
    }
    if found.manifest is not None:
        state = found.manifest.state
        values |= {
            "consumed_samples": state.consumed_samples,
            "consumed_tokens": state.consumed_tokens,
            "loss": found.manifest.loss,
            "eval_loss": found.manifest.eval_loss,
            "layout": found.manifest.layout.model_dump(),
        }
    return dict(finite_or_none(values))


def _print_table(path: Path, found: Sequence[Found]) -> None:
    console = wide_console(LEAST_WIDTH + max((len(entry.path.name) for entry in found), default=0))
    if not found:
        console.print(Text(f"{shown(str(path))} has no checkpoints"))
        return
    headings = ("step", "samples", "loss", "eval loss", "layout", "size", "age", "state")
    table = make_table("layouts: stages x replicas x tensor ranks", "folder", *headings)
    table.columns[0].justify = "left"
    table.columns[-1].justify = "left"
    for entry in found:
        table.add_row(*(Text(cell) for cell in _cells(entry)))
    console.print(table)
    for entry in found:
        for fault in entry.faults:
            console.print(Text(shown(fault), style="red"))
    if found[0].path != path:
        console.print(Text(_summary(found)))


def _cells(found: Found) -> list[str]:
    age = ABSENT if found.written_unix is None else duration(_age_seconds(found.written_unix))
    name = shown(found.path.name)
    step = ABSENT if found.step is None else whole(found.step)
    if found.manifest is None:
        return [name, step, ABSENT, ABSENT, ABSENT, ABSENT, size(found.size_bytes), age, _state(found)]
    manifest = found.manifest
    layout = manifest.layout
    return [
        name,
        step,
        whole(manifest.state.consumed_samples),
        _loss(manifest.loss),
        _loss(manifest.eval_loss),
        f"{layout.num_stages} x {layout.data_parallel_size} x {layout.tensor_parallel_size}",
        size(found.size_bytes),
        age,
        _state(found),
    ]


def _loss(loss: float | None) -> str:
    return ABSENT if loss is None else f"{loss:.4f}"


def _state(found: Found) -> str:
    if not found.is_complete:
        return KINDS[found.kind]
    return "whole" if found.is_verified else "complete"


def _summary(found: Sequence[Found]) -> str:
    total = size(sum(entry.size_bytes for entry in found))
    newest = newest_complete_of(found)
    if newest is None:
        return f"{total}; none is complete"
    return f"{total}, {sum(entry.is_complete for entry in found)} complete; --resume goes on from {newest.path.name}"


def _age_seconds(written_unix: float) -> float:
    # The clock of the machine that wrote it may be ahead of this one's.
    return max(0.0, time.time() - written_unix)
