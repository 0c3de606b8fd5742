"""Leads a run from its arguments to its exit code. Everything that can be refused is refused before torch loads."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from megastable.checkpoints.manifest import Manifest, read_manifest
from megastable.config import RunConfig, load_run_file
from megastable.core.errors import RunStoppedError, UserError, shown
from megastable.core.launch import Launch, check_port
from megastable.core.launch_variables import rank_as_given
from megastable.core.records import FRESH
from megastable.planning.micro_batches import with_chosen_micro_batches, with_recorded_micro_batches
from megastable.planning.run_plan import RunPlan, run_layout
from megastable.training.continuation import check_allowable, check_continues, nothing_left
from megastable.training.output import protect_standard_streams
from megastable.training.run_folder import RunFolder, checkpoint_to_load, checkpoint_to_resume

EXIT_CODE_INTERRUPTED = 130
"""Shells give 128 + 2 to a program that SIGINT (signal 2) has ended."""
RANK_0_SPEAKS_FIRST_SECONDS = 5.0
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


def run_command(request: RunRequest) -> int:
    """Train as requested and return the exit code."""
    protect_standard_streams()
    try:
        _plan_and_train(request)
    except RunStoppedError as error:
        # All ranks have come to the same decision at the same step, and leave together; rank 0 says why.
        if rank_as_given(os.environ) != "0":
            return error.exit_code
        return refuse(error)
    except UserError as error:
        return refuse(error)
    except KeyboardInterrupt:
        return EXIT_CODE_INTERRUPTED
    return 0


def _plan_and_train(request: RunRequest) -> None:
    launch = Launch.detect(os.environ)
    check_port(launch)
    check_start(request)
    folder = RunFolder(request.run_dir or Path("runs") / request.run_file.stem)
    folder.check_writable()
    checkpoint = _find_checkpoint(request, folder, launch)
    plan = _plan_from(checkpoint, request, launch)
    if plan is None:
        return

    from megastable.training.build import train  # loads torch and deepspeed

    train(plan, launch, folder, checkpoint, request.allowed_changes)


def check_start(request: RunRequest) -> None:
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


def check_writer_packages(run: RunConfig) -> None:
    """Check that the package of every enabled writer can be imported.

    Raises:
        UserError: a package is missing; the key and the command that installs it are named.
    """
    for section, package in WRITER_PACKAGES.items():
        if getattr(run, section).enabled and find_spec(package) is None:
            raise UserError(f"{section}.enabled needs the package {package}: pip install {package}")


def _find_checkpoint(request: RunRequest, folder: RunFolder, launch: Launch) -> Path | None:
    """Find the checkpoint that the run starts from; None for fresh weights."""
    if request.resume:
        found = checkpoint_to_resume(folder, request.resume == "auto", partial(_warn, launch))
        if found is not None:
            return found
    elif launch.rank == 0:  # the others may look when rank 0 has begun to fill the folder
        folder.check_unused()
    if request.load is not None:
        return checkpoint_to_load(request.load)
    return None


def _plan_from(checkpoint: Path | None, request: RunRequest, launch: Launch) -> RunPlan | None:
    """Plan the run from where it starts: all of it, or what a checkpoint leaves; None where that is nothing.

    Raises:
        UserError: the run file has faults, does not continue the checkpoint or does not fit the launch.
    """
    manifest = None if checkpoint is None else read_manifest(checkpoint)
    state = FRESH if manifest is None else manifest.state.to_training_state()
    run = load_run_file(request.run_file, request.overrides, launch.world_size, state)
    check_writer_packages(run)
    if checkpoint is not None and manifest is not None:
        run = _continuing(manifest, run, request, launch)
        all_done = nothing_left(checkpoint, state, run.megastable.training)
        if all_done is not None:
            if launch.rank == 0:
                print(shown(all_done))
            return None
    run = with_chosen_micro_batches(run, launch.world_size, state)
    return RunPlan.of(run, launch.world_size, state)


def _continuing(manifest: Manifest, run: RunConfig, request: RunRequest, launch: Launch) -> RunConfig:
    """Return the run as it continues the checkpoint: on its layout in the micro-batches that were chosen for it."""
    layout = run_layout(run, launch.world_size)
    # Before any choice of micro-batches: a run goes on in those that were chosen for it, and not in what a calibration
    # that has changed since would choose.
    if manifest.layout.model_dump() == asdict(layout):
        run = with_recorded_micro_batches(run, manifest.run, manifest.state.consumed_samples)
    check_continues(manifest, run, layout, request.allowed_changes, partial(_warn, launch))
    return run


def _warn(launch: Launch, text: str) -> None:
    if launch.rank == 0:
        _print_error(f"[megastable] {shown(text)}")


def refuse(error: UserError) -> int:
    """Print what a user has to mend, once for all ranks of a launch, and return the exit code."""
    # Read from the environment, since an error may be that the launch could not be detected.
    rank = rank_as_given(os.environ)
    if rank != "0":
        # All ranks find the same fault. A launcher ends the others with the first that exits: let rank 0 speak.
        time.sleep(RANK_0_SPEAKS_FIRST_SECONDS)
    where = "" if rank == "0" else f" on rank {shown(rank)}"
    _print_error(f"[megastable] error{where}: {error}")
    return error.exit_code


def refuse_command_line(fault: str, usage: str) -> int:
    """Refuse a command line that ``argparse`` cannot read, as any other mistake; returns the exit code."""
    hint = ""
    if fault.startswith("unrecognized arguments"):
        hint = "; a path with a blank has to be quoted, e.g. --run-dir 'my runs/one'"
    return refuse(UserError(f"{fault}{hint}\n{usage.rstrip()}"))


def _print_error(text: str) -> None:
    """Print to standard error what it can hold: it may be closed, ASCII, or a pipe whose reader has left."""
    stream = sys.stderr
    # Python has no stream where the descriptor was closed when it started.
    if stream is None:
        return
    encoding = stream.encoding or "ascii"
    with contextlib.suppress(OSError, ValueError):
        print(text.encode(encoding, "backslashreplace").decode(encoding), file=stream, flush=True)
