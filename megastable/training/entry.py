"""Leads a run from its arguments to its exit code. Everything that can be refused is refused before torch loads."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from megastable.config import RunConfig, load_run_file
from megastable.core.checkpoint_folder import read_manifest
from megastable.core.errors import RunFolderError, RunStoppedError, UserError, shown
from megastable.core.launch import Launch, check_port
from megastable.core.launch_variables import rank_as_given
from megastable.planning.micro_batches import with_chosen_micro_batches, with_recorded_micro_batches
from megastable.planning.run_plan import RunPlan
from megastable.training.output import protect_standard_streams
from megastable.training.run_folder import (
    RunFolder,
    check_continues,
    checkpoint_to_load,
    checkpoint_to_resume,
    nothing_left,
)
from megastable.training.run_lock import RunLock

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
    resume: bool = False
    load: Path | None = None


def run_command(request: RunRequest) -> int:
    """Train as requested and return the exit code."""
    protect_standard_streams()
    try:
        # What is held is given back when this is left, in whatever way.
        with contextlib.ExitStack() as held:
            _plan_and_train(request, held)
    except RunStoppedError as error:
        # All ranks have come to the same decision at the same step, and leave together; rank 0 says why.
        if rank_as_given(os.environ) != "0":
            return error.exit_code
        return refuse(error)
    except RunFolderError as error:
        exit_code = refuse(error)
        _refuse_other_nodes(error)
        return exit_code
    except UserError as error:
        return refuse(error)
    except KeyboardInterrupt:
        return EXIT_CODE_INTERRUPTED
    return 0


def _plan_and_train(request: RunRequest, held: contextlib.ExitStack) -> None:
    launch = Launch.detect(os.environ)
    check_port(launch)
    run = load_run_file(request.run_file, request.overrides, launch.world_size)
    check_writer_packages(run)
    folder = RunFolder(request.run_dir or Path("runs") / request.run_file.stem)
    folder.check_writable()
    # Before any checkpoint is looked for, which another run may be writing. The other ranks write nothing before they
    # have met rank 0, and so not before the folder is locked.
    lock = held.enter_context(RunLock.take(folder)) if launch.rank == 0 else None
    checkpoint = _find_checkpoint(request, folder, launch)
    # Before the choice of micro-batches: a run goes on in those that were chosen for it, and not in what a calibration
    # that has changed since would choose.
    if checkpoint is not None:
        run = _continuing(checkpoint, run, launch)
    run = with_chosen_micro_batches(run, launch.world_size)
    plan = RunPlan.of(run, launch.world_size)
    all_done = None if checkpoint is None else nothing_left(checkpoint, plan)
    if all_done is not None:
        if launch.rank == 0:
            print(shown(all_done))
        return

    from megastable.training.build import train  # loads torch and deepspeed

    train(plan, launch, folder, checkpoint, lock)


def _refuse_other_nodes(error: RunFolderError) -> None:
    """End the ranks of other nodes, which would wait for rank 0: its launcher may not end them."""
    launch = Launch.detect(os.environ)
    if not launch.single_node:
        from megastable.engine.process_group import refuse_other_ranks

        refuse_other_ranks(launch, str(error))


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
        return checkpoint_to_resume(folder, partial(_warn, launch))
    if launch.rank == 0:  # the others may look when rank 0 has begun to fill the folder
        folder.check_unused()
    if request.load is not None:
        return checkpoint_to_load(request.load)
    return None


def _continuing(checkpoint: Path, run: RunConfig, launch: Launch) -> RunConfig:
    """Return the run as it continues the checkpoint: in the micro-batches that were chosen for it."""
    manifest = read_manifest(checkpoint)
    run = with_recorded_micro_batches(run, manifest.run)
    check_continues(manifest, run, launch.world_size, partial(_warn, launch))
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
