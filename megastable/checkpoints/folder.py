"""The folder of a run's checkpoints: their names, which are complete, and how one is published.

A checkpoint is written to ``step_00000010.partial``; its manifest, with every file's size and checksum, is written
last, and then the folder is renamed. Nothing that is whole makes way but for another whole one of its step.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal

from megastable.checkpoints.manifest import Manifest, read_manifest, step_in_name
from megastable.core.errors import UserError
from megastable.core.flush import flush_to_disk

PARTIAL_SUFFIX: Final = ".partial"
"""It is being written, or its writer died."""
DAMAGED_SUFFIX: Final = ".damaged"
"""It was found to be damaged when its step was written anew."""
SUPERSEDED_SUFFIX: Final = ".superseded"
"""It is whole, and its step is being published anew; it goes once that is done."""
ABANDONED_SUFFIX: Final = ".abandoned"
"""It is whole, and of steps that the run has gone back from; it goes once a later save is whole."""
DELETING_SUFFIX: Final = ".deleting"
"""It is being deleted."""
NAMED_FAULTS: Final = 5
"""A damaged checkpoint may lack a file of every rank; its message names this many."""


Kind = Literal["checkpoint", "partial", "damaged", "superseded", "abandoned", "deleting", "other"]
"""What a folder is by its name; ``other`` is none of the rest."""

_KINDS: Final[Mapping[str, Kind]] = {
    "": "checkpoint",
    PARTIAL_SUFFIX: "partial",
    DAMAGED_SUFFIX: "damaged",
    SUPERSEDED_SUFFIX: "superseded",
    ABANDONED_SUFFIX: "abandoned",
    DELETING_SUFFIX: "deleting",
}


def folder_name(step: int) -> str:
    """Return the name of a step's checkpoint: ``step_00000010`` for step 10."""
    return f"step_{step:08d}"


def step_of(folder: Path) -> int:
    """Return the step in the name of a folder that ``step_folders`` lists."""
    return int(folder.name.removeprefix("step_"))


def step_folders(checkpoints: Path) -> list[Path]:
    """List all published checkpoint folders, whole or not, newest first.

    Raises:
        UserError: the folder cannot be read.
    """
    try:
        found = [path for path in checkpoints.iterdir() if kind_of(path) == "checkpoint" and path.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise UserError(f"{checkpoints} cannot be read: {error.strerror}") from error
    return sorted(found, key=step_of, reverse=True)


def kind_of(path: Path) -> Kind:
    """Tell by its name what ``path`` is."""
    name, dot, suffix = path.name.partition(".")
    step = step_in_name(name)
    # Of two names of one step only ours counts: the one with no zero more than needed.
    if step is None or name != folder_name(step):
        return "other"
    return _KINDS.get(dot + suffix, "other")


def complete_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint whose files are all there, each with its size.

    Sizes, not checksums: a copy or write that was cut short shows in them, and terabytes are not read to find it. What
    they do not show, ``verify`` finds.

    Raises:
        UserError: it is no complete checkpoint; the faults are named.
    """
    manifest = read_manifest(folder)
    found = (fault_of_size(folder / name, record.bytes) for name, record in manifest.files.items())
    faults = [fault for fault in found if fault is not None]
    if faults:
        more = f", and {len(faults) - NAMED_FAULTS} more faults" if len(faults) > NAMED_FAULTS else ""
        raise UserError(f"{folder} is damaged: {', '.join(faults[:NAMED_FAULTS])}{more}")
    return manifest


def fault_of_size(path: Path, size_bytes: int) -> str | None:
    """Say why ``path`` is not a file of so many bytes; None where it is."""
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return f"{path.name} is missing"
    except OSError as error:
        return f"{path.name} cannot be read ({error.strerror})"
    if not stat.S_ISREG(status.st_mode):
        return f"{path.name} is not a file"
    if status.st_size != size_bytes:
        return f"{path.name} has {status.st_size:,} bytes instead of {size_bytes:,}"
    return None


def newest_complete(
    checkpoints: Path,
    warn: Callable[[str], None],
    before_step: int | None = None,
    passed_over: Collection[Path] = (),
    sane_loss: bool = False,
    is_finished: Callable[[Manifest], bool] = Manifest.is_at_its_end,
) -> Path | None:
    """Find the complete checkpoint of the highest step that a run can go on from; see ``preferred``.

    Args:
        warn: is told of damaged ones and others that are passed over.
        before_step: look only at checkpoints of lower steps.
        passed_over: known not to do, although they are complete by their sizes.
        sane_loss: pass over those of a run whose loss was far above its lowest value, too.
        is_finished: tells whether no step would follow the checkpoint.
    """
    folders = [folder for folder in step_folders(checkpoints) if folder not in passed_over]
    if before_step is not None:
        folders = [folder for folder in folders if step_of(folder) < before_step]
    return preferred(_complete_ones(folders, warn), warn, sane_loss, is_finished)


def _complete_ones(folders: Sequence[Path], warn: Callable[[str], None]) -> Iterator[tuple[Path, Manifest]]:
    for folder in folders:
        try:
            yield folder, complete_manifest(folder)
        except UserError as error:
            warn(f"{error}; falling back to an older checkpoint")


def preferred(
    complete: Iterable[tuple[Path, Manifest]],
    warn: Callable[[str], None],
    sane_loss: bool = False,
    is_finished: Callable[[Manifest], bool] = Manifest.is_at_its_end,
) -> Path | None:
    """Choose the checkpoint that a run goes on from; the one rule for a resume, a rollback and whoever tells of them.

    It is the newest that was not saved in a row of skipped steps, for the run would go on skipping; but for one after
    which no step follows. Where there is no other it is the newest all the same.

    Args:
        complete: newest first; no more of them are asked for than needed.
        warn: is told of those that are passed over.
        sane_loss, is_finished: as in ``newest_complete``.
    """
    suspect = None
    for folder, manifest in complete:
        why = None
        if manifest.is_in_skips and not is_finished(manifest):
            why = "in a row of skipped steps"
        elif sane_loss and manifest.is_diverging:
            why = "while the loss was too high"
        if why is None:
            return folder
        suspect = suspect or folder
        warn(f"{folder} was saved {why}; looking for an older checkpoint")
    if suspect is not None:
        warn(f"no older checkpoint is better: {suspect} is taken all the same")
    return suspect


def publish(partial: Path, final: Path) -> None:
    """Give a finished checkpoint its name.

    A damaged one of that name is kept as ``.damaged``, the last of them alone. A complete one, which a run leaves that
    went back and took the step again, is replaced: until the new one stands it is kept as ``.superseded``, from which
    ``clean_up`` takes it back after a death in between.
    """
    if os.path.lexists(final):
        aside = final.with_name(final.name + _suffix_of_replaced(final))
        # A rename would fail on a folder that is not empty.
        _remove(aside)
        os.replace(final, aside)
    os.replace(partial, final)
    flush_to_disk(final.parent)
    _remove(final.with_name(final.name + SUPERSEDED_SUFFIX))


def delete(folder: Path) -> None:
    """Delete a checkpoint; it loses its name first, so that no half of it ever looks like one."""
    aside = folder.with_name(folder.name + DELETING_SUFFIX)
    _remove(aside)
    os.replace(folder, aside)
    flush_to_disk(folder.parent)
    _remove(aside)


def abandon_after(checkpoints: Path, step: int) -> None:
    """Take the names of later steps' checkpoints from them: no resume may go on from what a run has gone back from."""
    for folder in step_folders(checkpoints):
        if step_of(folder) > step:
            aside = folder.with_name(folder.name + ABANDONED_SUFFIX)
            _remove(aside)
            os.replace(folder, aside)
    if checkpoints.is_dir():
        flush_to_disk(checkpoints)


def delete_abandoned(checkpoints: Path) -> None:
    """Delete the checkpoints of what a run has gone back from; called once a later save is whole."""
    for path in sorted(checkpoints.glob("step_*")):
        if kind_of(path) == "abandoned":
            _remove(path)


def clean_up(checkpoints: Path) -> list[str]:
    """Remove what a killed run left unfinished; only the one writer of the folder calls this, before it writes.

    A complete checkpoint that was about to be replaced gets its name back. What was set aside as damaged stays.

    Returns:
        A sentence for everything that was done.
    """
    done = give_back_superseded(checkpoints)
    for path in sorted(checkpoints.glob("step_*")):
        if kind_of(path) in ("superseded", "partial", "deleting"):
            _remove(path)
            done.append(f"removed {path}, which a killed run left")
    return done


def give_back_superseded(checkpoints: Path) -> list[str]:
    """Give complete checkpoints their names back that a killed run was about to replace; only the writer calls this.

    Returns:
        A sentence for each.
    """
    done = []
    for path in sorted(checkpoints.glob("step_*")):
        final = path.with_suffix("")
        if kind_of(path) == "superseded" and not os.path.lexists(final):
            os.replace(path, final)
            flush_to_disk(checkpoints)
            done.append(f"{path} was about to be replaced, and is {final.name} again")
    return done


def _suffix_of_replaced(final: Path) -> str:
    try:
        complete_manifest(final)
    except UserError:
        return DAMAGED_SUFFIX
    return SUPERSEDED_SUFFIX


def _remove(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)
