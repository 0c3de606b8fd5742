"""Keeps the folder of a run: its config, metrics and checkpoints; and finds what a run may start from."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO

from megastable.checkpoints.folder import complete_manifest, newest_complete, step_folders
from megastable.checkpoints.manifest import Manifest
from megastable.config import RunConfig
from megastable.config.run_config import run_as_dict
from megastable.core.errors import RunFolderError, UserError
from megastable.core.run_paths import RunPaths

LONGEST_LINE_BYTES = 16 * 2**20
"""No step and no event takes as much, by far."""


class RunFolder(RunPaths):
    """Writes the files of one run and refuses to overwrite another's; only rank 0 calls what writes."""

    @property
    def holds_run(self) -> bool:
        """Tell whether a run has written steps or checkpoints here."""
        # An empty file is of a run that ended before its first step: nothing is lost with it.
        has_steps = self.metrics.exists() and self.metrics.stat().st_size > 0
        return has_steps or bool(step_folders(self.checkpoints))

    def check_unused(self) -> None:
        """Refuse to write a new run over an old one.

        Raises:
            RunFolderError: the folder holds a run.
        """
        if not self.holds_run:
            return
        if step_folders(self.checkpoints):
            raise RunFolderError(
                f"{self.path} already holds a run. Continue it with --resume, or write to another folder with "
                "--run-dir PATH"
            )
        raise RunFolderError(
            f"{self.path} already holds a run, which saved no checkpoint. Start it again from step 0 with "
            "--resume=auto, remove the folder, or write to another one with --run-dir PATH"
        )

    def write_config(self, run: RunConfig) -> None:
        """Write ``config.json``: the run file with defaults filled in and every ``--set`` applied."""
        self.path.mkdir(parents=True, exist_ok=True)
        # By another name first: whoever watches the folder never reads half a file.
        written = self.config.with_suffix(".tmp")
        written.write_text(json.dumps(run_as_dict(run), indent=2) + "\n", encoding="utf-8")
        os.replace(written, self.config)

    def drop_lines_after(self, step: int) -> list[str]:
        """Move the lines of later steps, which a resumed run writes again, to ``*.superseded.jsonl``.

        Lines that cannot be read go there as well; a file that cannot be read gets another name.

        Returns:
            A sentence for each file in which something could not be read.
        """
        found = [_drop_lines_after(path, step) for path in (self.metrics, self.events) if os.path.lexists(path)]
        return [text for text in found if text is not None]


def _drop_lines_after(path: Path, step: int) -> str | None:
    try:
        with open(path, "rb") as file:
            steps = [_step_of(line) for line in file]
            ends_whole = _ends_with_newline(file)
    except OSError as error:  # a disk that fails, a link to itself
        aside = _free_name(path)
        os.replace(path, aside)
        return f"{path.name} cannot be read ({error.strerror}); it is now {aside.name}"
    is_kept = [number is not None and number <= step for number in steps]
    # A kill may cut the last line short, or take its newline alone; the next line would be joined to it.
    if all(is_kept) and ends_whole:
        return None
    superseded = path.with_suffix(".superseded.jsonl")
    written = path.with_suffix(".tmp")
    with open(path, "rb") as old, open(superseded, "ab") as dropped, open(written, "wb") as kept:
        for line, stays in zip(old, is_kept, strict=True):
            target = kept if stays else dropped
            target.write(line.rstrip(b"\n") + b"\n")
    os.replace(written, path)
    num_unreadable = steps.count(None)
    if num_unreadable == 0:
        return None
    plural = "s" if num_unreadable > 1 else ""
    return f"{path.name} had {num_unreadable} line{plural} that cannot be read; moved to {superseded.name}"


def _step_of(line: bytes) -> int | None:
    """Return the step of a line of metrics or events; None where it is none, as after a kill that cut it short."""
    if len(line) > LONGEST_LINE_BYTES:
        return None
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # bytes that are no UTF-8 are ValueErrors too
        return None
    step = row.get("step") if isinstance(row, dict) else None
    # type() and not isinstance(): to Python, JSON's true is the number 1.
    return step if type(step) is int else None


def _ends_with_newline(file: IO[bytes]) -> bool:
    if file.tell() == 0:
        return True
    file.seek(-1, os.SEEK_END)
    return file.read(1) == b"\n"


def _free_name(path: Path) -> Path:
    """Return a name beside ``path`` that nothing has: ``metrics.unreadable.jsonl`` or with a number."""
    aside = path.with_suffix(".unreadable.jsonl")
    number = 1
    while os.path.lexists(aside):
        number += 1
        aside = path.with_suffix(f".unreadable-{number}.jsonl")
    return aside


def checkpoint_to_resume(
    folder: RunFolder,
    auto: bool,
    warn: Callable[[str], None],
    is_finished: Callable[[Manifest], bool] = Manifest.is_at_its_end,
) -> Path | None:
    """Find the newest complete checkpoint of the run folder that a run can go on from.

    Args:
        auto: where none was ever written, the run starts from step 0.
        warn: is told of checkpoints that are passed over, and of a start over the lines of an earlier one.
        is_finished: tells whether no step would follow a checkpoint.

    Returns:
        The checkpoint; None for a start from step 0.

    Raises:
        UserError: no checkpoint is complete.
    """
    found = newest_complete(folder.checkpoints, warn, is_finished=is_finished)
    if found is not None:
        return found
    if step_folders(folder.checkpoints):
        # They may be unreadable for a while only: a run from step 0 would mix with them.
        raise UserError(
            f"--resume: there is no complete checkpoint in {folder.checkpoints}, only damaged ones. To start from step "
            "0, move them away and write --resume=auto"
        )
    if not auto:
        raise UserError(
            f"--resume: there is no complete checkpoint in {folder.checkpoints}; --resume=auto starts from step 0 then"
        )
    if folder.holds_run:
        warn(
            f"{folder.path} holds a run that saved no checkpoint: it starts again from step 0; lines of metrics and "
            "events that are there are kept in *.superseded.jsonl"
        )
    return None


def checkpoint_to_load(path: Path) -> Path:
    """Check the checkpoint folder that ``--load`` names, and return its absolute path.

    Raises:
        UserError: it is no complete checkpoint.
    """
    if not os.path.isdir(path):
        raise UserError(f"--load: {path} is not a folder; name a checkpoint like runs/x/checkpoints/step_00000010")
    for checkpoints in (RunPaths(path).checkpoints, path):
        if step_folders(checkpoints):
            newest = newest_complete(checkpoints, warn=lambda text: None)
            found = "none in it is complete" if newest is None else f"the newest complete one is {newest}"
            raise UserError(f"--load: {path} holds checkpoints and is none; name one of them: {found}")
    complete_manifest(path)  # raises where a file is missing or cut short
    return path.resolve()
