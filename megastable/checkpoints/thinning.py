"""Room on the disk: which old checkpoints go once a newer one is safe, and whether the next one fits."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megastable.checkpoints.folder import complete_manifest, delete, folder_name, step_folders, step_of
from megastable.config.training import CheckpointConfig
from megastable.core.errors import UserError


@dataclass(frozen=True)
class SavedStep:
    """A complete checkpoint, as far as it matters to whether it is kept."""

    step: int
    eval_loss: float | None


def steps_to_delete(saved: Sequence[SavedStep], verified_step: int, keep: CheckpointConfig) -> list[int]:
    """Choose the checkpoints that go, oldest first; none that is as new as ``verified_step``.

    Kept are the newest ``keep_last``, the multiples of ``keep_every`` and, of the others, the ``keep_best`` with the
    lowest validation losses.

    Args:
        saved: the complete checkpoints, in any order.
        verified_step: the checkpoint that was just published, whose files were read back.
    """
    if keep.keep_last is None or verified_step not in {entry.step for entry in saved}:
        return []
    newest_first = sorted((entry for entry in saved if entry.step <= verified_step), key=lambda entry: -entry.step)
    others = [entry for entry in newest_first[keep.keep_last :] if not _is_kept_for_ever(entry.step, keep)]
    evaluated = [entry for entry in others if entry.eval_loss is not None and math.isfinite(entry.eval_loss)]
    # Sorting is stable: of two equal losses the newer one is kept.
    best = sorted(evaluated, key=lambda entry: entry.eval_loss or 0.0)[: keep.keep_best or 0]
    return [entry.step for entry in reversed(others) if entry not in best]


def _is_kept_for_ever(step: int, keep: CheckpointConfig) -> bool:
    return keep.keep_every is not None and step % keep.keep_every == 0


def what_stays(keep: CheckpointConfig) -> str:
    """Say, as the end of a sentence on the checkpoints of a run, which of them stay; empty where all do."""
    if keep.keep_last is None:
        return ""
    kinds = [f"the newest {keep.keep_last:,}"]
    if keep.keep_every is not None:
        kinds.append(f"those at multiples of {keep.keep_every:,} steps")
    if keep.keep_best is not None:
        kinds.append(f"the {keep.keep_best:,} of the lowest validation loss")
    return f"; of these stay {' and '.join(kinds)}"


def thin(checkpoints: Path, verified_step: int, keep: CheckpointConfig) -> list[Path]:
    """Delete the checkpoints that ``keep`` does not ask for; only their writer calls this, after a save.

    A damaged one is neither counted nor deleted.

    Args:
        verified_step: the checkpoint that was just published, whose files were read back.

    Returns:
        Those that are gone.

    Raises:
        OSError: one cannot be renamed.
    """
    if keep.keep_last is None:
        return []
    deleted = []
    for step in steps_to_delete(_read(checkpoints, keep, keep.keep_last), verified_step, keep):
        folder = checkpoints / folder_name(step)
        delete(folder)
        deleted.append(folder)
    return deleted


def _read(checkpoints: Path, keep: CheckpointConfig, keep_last: int) -> list[SavedStep]:
    saved: list[SavedStep] = []
    for folder in step_folders(checkpoints):
        # There may be thousands of those that stay whatever is in them, and this is done after every save.
        if len(saved) >= keep_last and _is_kept_for_ever(step_of(folder), keep):
            continue
        try:
            saved.append(SavedStep(step_of(folder), complete_manifest(folder).eval_loss))
        except UserError:
            continue
    return saved


def space_fault(folder: Path, needed_bytes: int) -> str | None:
    """Say that the next checkpoint does not fit on the disk of ``folder``; None where it does, or nothing is known.

    Args:
        needed_bytes: what all processes that write to this disk write together.
    """
    try:
        usage = shutil.disk_usage(folder)
    except OSError:  # it vanished, or is out of reach: the save itself says so better
        return None
    # Some network file systems do not tell.
    if usage.total == 0 or usage.free >= needed_bytes:
        return None
    return f"{folder} has {usage.free:,} bytes free, and a checkpoint takes {needed_bytes:,}"
