"""Decides what a run starts from, fresh weights or a whole checkpoint, and plans what is left of it from there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from megastable.checkpoints.folder import newest_complete
from megastable.checkpoints.manifest import Manifest, read_manifest
from megastable.config import RunConfig, load_run_file
from megastable.core.errors import UserError
from megastable.core.launch import Launch
from megastable.core.records import FRESH
from megastable.planning.micro_batches import with_chosen_micro_batches, with_recorded_micro_batches
from megastable.planning.run_plan import RunPlan, run_layout
from megastable.training.continuation import check_allowable, check_continues, nothing_left
from megastable.training.run_folder import RunFolder, checkpoint_to_load, checkpoint_to_resume

WRITER_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml"}
"""Section of the run file to the package behind DeepSpeed's writer of that name, which is no dependency of ours."""


@dataclass(frozen=True)
class RunRequest:
    """Holds what the command line of a run asks for."""

    run_file: Path
    overrides: Sequence[str] = ()
    run_dir: Path | None = None
    """None for ``runs/<name of the run file>``."""
    resume: bool | Literal["auto"] = False
    """Whether to continue the run folder; "auto": where there is a checkpoint, and else to start."""
    load: Path | None = None
    allowed_changes: Sequence[str] = ()
    """Keys that are fixed by habit, and may differ from the checkpoint's."""


class NothingLeftError(Exception):
    """Says that the run has taken all its steps."""


@dataclass(frozen=True)
class Start:
    """What a run starts from.

    Attributes:
        plan: of what is left of the run.
        checkpoint: a complete one that has been checked against the run; None for fresh weights.
        manifest: its manifest.
        older: returns the start from another checkpoint, given what is wrong with the files of this one.
        allowed_changes: keys that are fixed by habit, and may differ from the checkpoint's.
    """

    plan: RunPlan
    checkpoint: Path | None
    manifest: Manifest | None
    older: Callable[[list[str]], Start]
    allowed_changes: Sequence[str]


def find_start(request: RunRequest, launch: Launch, folder: RunFolder, warn: Callable[[str], None]) -> Start:
    """Find what the run starts from as its command line asks, and plan it.

    Args:
        warn: is told of what is passed over or has changed.

    Raises:
        UserError: options exclude each other; the folder holds another run; no checkpoint is complete; the run file has
            faults, does not continue the checkpoint or does not fit the launch.
        NothingLeftError: the checkpoint is at the end of the run.
    """
    _check_request(request)
    return _start_from(_find_checkpoint(request, launch, folder, warn), (), request, launch, folder, warn)


def _check_request(request: RunRequest) -> None:
    """Check what the command line says of where the run starts from.

    Raises:
        UserError: options exclude each other, or ``--allow-change`` names what it cannot allow.
    """
    if request.resume is True and request.load is not None:
        raise UserError(
            "--resume continues the run folder itself, --load a checkpoint of another one: give one of them; "
            "--resume=auto with --load continues the run folder where it has a checkpoint, and else loads"
        )
    if request.allowed_changes and not request.resume and request.load is None:
        raise UserError("--allow-change is about a checkpoint, which --resume or --load names")
    check_allowable(request.allowed_changes)


def _find_checkpoint(
    request: RunRequest, launch: Launch, folder: RunFolder, warn: Callable[[str], None]
) -> Path | None:
    """Find the checkpoint that the run starts from; None for fresh weights."""
    if request.resume:
        found = checkpoint_to_resume(folder, request.resume == "auto", warn, partial(_is_finished, request, launch))
        if found is not None:
            return found
    elif launch.rank == 0:  # the others may look when rank 0 has begun to fill the folder
        folder.check_unused()
    if request.load is not None:
        return checkpoint_to_load(request.load)
    return None


def _is_finished(request: RunRequest, launch: Launch, manifest: Manifest) -> bool:
    """Tell whether the run as its file is now has taken all its steps at a checkpoint."""
    state = manifest.state.to_training_state()
    run = load_run_file(request.run_file, request.overrides, launch.world_size, state)
    return not run.megastable.training.goes_on(state.step, state.consumed_samples)


def _start_from(
    checkpoint: Path | None,
    damaged: Sequence[Path],
    request: RunRequest,
    launch: Launch,
    folder: RunFolder,
    warn: Callable[[str], None],
) -> Start:
    """Plan the run from where it starts: all of it, or what a checkpoint leaves.

    Args:
        damaged: checkpoints that were to be started from, and are not whole.
    """
    manifest = None if checkpoint is None else read_manifest(checkpoint)
    state = FRESH if manifest is None else manifest.state.to_training_state()
    run = load_run_file(request.run_file, request.overrides, launch.world_size, state)
    check_writers(run, folder)
    if checkpoint is not None and manifest is not None:
        run = _continuing(manifest, run, request, launch, warn)
        all_done = nothing_left(checkpoint, state, run.megastable.training)
        if all_done is not None:
            raise NothingLeftError(all_done)
    run = with_chosen_micro_batches(run, launch.world_size, state)
    plan = RunPlan.of(run, launch.world_size, state)
    older = partial(_older_start, checkpoint, damaged, request, launch, folder, warn)
    return Start(plan, checkpoint, manifest, older, request.allowed_changes)


def _older_start(
    checkpoint: Path | None,
    damaged: Sequence[Path],
    request: RunRequest,
    launch: Launch,
    folder: RunFolder,
    warn: Callable[[str], None],
    faults: list[str],
) -> Start:
    """Start from another checkpoint than one that is damaged, where the run itself chose that.

    Raises:
        UserError: ``--load`` has named it, or there is no older one.
    """
    assert checkpoint is not None
    what = f"{checkpoint} is damaged: {', '.join(faults)}"
    if checkpoint.parent != folder.checkpoints:
        raise UserError(f"--load: {what}")
    warn(f"{what}; falling back to an older checkpoint")
    damaged = (*damaged, checkpoint)
    # Among all of them once more: a newer one that was passed over for this one may be all there is.
    is_finished = partial(_is_finished, request, launch)
    found = newest_complete(folder.checkpoints, warn, passed_over=damaged, is_finished=is_finished)
    if found is None:
        raise UserError(f"--resume: there is no whole checkpoint in {folder.checkpoints}, only damaged ones")
    return _start_from(found, damaged, request, launch, folder, warn)


def _continuing(
    manifest: Manifest, run: RunConfig, request: RunRequest, launch: Launch, warn: Callable[[str], None]
) -> RunConfig:
    """Return the run as it continues the checkpoint: on its layout in the micro-batches that were chosen for it."""
    layout = run_layout(run, launch.world_size)
    # Before any choice of micro-batches: a run goes on in those that were chosen for it, and not in what a calibration
    # that has changed since would choose.
    if manifest.layout.model_dump() == asdict(layout):
        run = with_recorded_micro_batches(run, manifest.run, manifest.state.consumed_samples)
    check_continues(manifest, run, layout, request.allowed_changes, warn)
    return run


def check_writers(run: RunConfig, folder: RunFolder) -> None:
    """Check that the package of every enabled writer can be imported, and that it can write into the run folder.

    Raises:
        UserError: a package is missing, or TensorBoard, which writes by names in UTF-8 alone, cannot name the folder.
    """
    for section, package in WRITER_PACKAGES.items():
        if getattr(run, section).enabled and find_spec(package) is None:
            raise UserError(f"{section}.enabled needs the package {package}: pip install {package}")
    if run.tensorboard.enabled and not run.tensorboard.output_path and not _is_utf8(folder.path):
        raise UserError(
            f"tensorboard.enabled: TensorBoard can only write into folders whose names are UTF-8, and {folder.path} is "
            "none; name another folder with tensorboard.output_path"
        )


def _is_utf8(path: Path) -> bool:
    # Bytes of a name that are not UTF-8 stand in Python's text as halves of surrogate pairs.
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True
