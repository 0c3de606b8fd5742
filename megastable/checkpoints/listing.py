"""What lies in a folder of checkpoints, for people to look at: every checkpoint, and what is left of others."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megastable.checkpoints.folder import Kind, complete_manifest, kind_of, preferred
from megastable.checkpoints.manifest import MANIFEST_NAME, Manifest, step_in_name
from megastable.checkpoints.verify import verify
from megastable.core.errors import UserError
from megastable.core.run_paths import RunPaths


@dataclass(frozen=True)
class Found:
    """One entry of a folder of checkpoints."""

    path: Path
    kind: Kind
    manifest: Manifest | None
    """None where it cannot be read, or a file is missing or of another size."""
    faults: tuple[str, ...]
    """What is wrong with it, one sentence each; of what is no checkpoint nothing is expected."""
    size_bytes: int
    """On the disk, with files that do not belong to it."""
    written_unix: float | None
    """When its manifest was written; where it has none, when the folder last changed."""
    is_verified: bool = False
    """Whether all its files were read and compared with their checksums."""

    @property
    def step(self) -> int | None:
        """Return the step of its name; None for one without."""
        return step_in_name(self.path.name)

    @property
    def is_complete(self) -> bool:
        """Tell whether it is a checkpoint, by whatever name, with which nothing is wrong; leftovers are none."""
        return self.kind in ("checkpoint", "other") and not self.faults


def newest_complete_of(found: Sequence[Found]) -> Found | None:
    """Return the published checkpoint that a resume takes, of those with which nothing is wrong."""
    complete = [entry for entry in found if entry.kind == "checkpoint" and entry.is_complete]
    complete.sort(key=lambda entry: entry.step or 0, reverse=True)
    with_manifests = ((entry.path, entry.manifest) for entry in complete if entry.manifest is not None)
    taken = preferred(with_manifests, warn=lambda text: None)
    return next((entry for entry in complete if entry.path == taken), None)


def paths_to_look_at(path: Path) -> list[Path]:
    """List what begins like a checkpoint in a run folder or a folder of checkpoints, oldest first; or ``path`` itself.

    Raises:
        UserError: ``path`` is none of these.
    """
    if not path.is_dir():
        raise UserError(f"{path} is no folder. Name the folder that a run writes, e.g. runs/quickstart")
    if kind_of(path) != "other" or os.path.lexists(path / MANIFEST_NAME):
        return [path]
    run = RunPaths(path)
    if run.checkpoints.is_dir():
        return _step_paths(run.checkpoints)
    found = _step_paths(path)
    is_run_folder = run.config.exists() or run.metrics.exists()
    if found or is_run_folder or path.name == run.checkpoints.name:
        return found
    raise UserError(
        f"{path} is no run folder: it has neither {run.checkpoints.name} nor {run.config.name}. Name the folder that a "
        "run writes, e.g. runs/quickstart, its checkpoints, or one of them"
    )


def _step_paths(checkpoints: Path) -> list[Path]:
    # Step numbers of eight digits sort by their names, and longer ones come after them.
    found = (path for path in checkpoints.iterdir() if path.name.startswith("step_"))
    return sorted(found, key=lambda path: (len(path.name.partition(".")[0]), path.name))


def look_at(path: Path) -> Found:
    """Find out what ``path`` is, and whether it is complete by the sizes of its files."""
    kind = kind_of(path)
    manifest = None
    faults: tuple[str, ...] = ()
    try:
        manifest = complete_manifest(path)
    except UserError as error:
        # The leftover of a checkpoint is not expected to be one.
        faults = (str(error),) if kind in ("checkpoint", "other") else ()
    return Found(path, kind, manifest, faults, _size_of(path), _written_unix(path))


def verified(found: Found, progress: Callable[[int], None]) -> Found:
    """Read all of a checkpoint, and return it with every fault that shows.

    Args:
        progress: called with the number of bytes of every part that was read.
    """
    return replace(found, faults=tuple(verify(found.path, progress)), is_verified=True)


def _size_of(path: Path) -> int:
    return sum(_size_of_file(os.path.join(folder, name)) for folder, _, names in os.walk(path) for name in names)


def _size_of_file(path: str) -> int:
    try:
        return os.lstat(path).st_size
    except OSError:  # its writer has just removed it
        return 0


def _written_unix(path: Path) -> float | None:
    for place in (path / MANIFEST_NAME, path):
        try:
            return os.stat(place).st_mtime
        except OSError:
            continue
    return None
