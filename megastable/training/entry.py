"""Leads a run from its arguments to its exit code. Everything that can be refused is refused before torch loads."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path

from megastable.checkpoints.folder import clean_up, give_back_superseded
from megastable.core.errors import AskedToStopError, RunFolderError, RunStoppedError, UserError, shown
from megastable.core.launch import Launch, check_port
from megastable.core.launch_variables import rank_as_given
from megastable.training.output import protect_standard_streams
from megastable.training.run_folder import RunFolder
from megastable.training.run_lock import RunLock
from megastable.training.start import NothingLeftError, RunRequest, find_start

EXIT_CODE_INTERRUPTED = 130
"""Shells give 128 + 2 to a program that SIGINT (signal 2) has ended."""
RANK_0_SPEAKS_FIRST_SECONDS = 5.0


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
        if isinstance(error, AskedToStopError):
            _print_error(f"[megastable] {error}")
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
    folder = RunFolder(request.run_dir or Path("runs") / request.run_file.stem)
    folder.check_writable()
    # Before any checkpoint is looked for, which another run may be writing. The other ranks write nothing before they
    # have met rank 0, and so not before the folder is locked.
    lock = None
    if launch.rank == 0:
        lock = held.enter_context(RunLock.take(folder))
        give_back_superseded(folder.checkpoints)

    def warn(text: str) -> None:
        if launch.rank == 0:
            _print_error(f"[megastable] {shown(text)}")

    try:
        start = find_start(request, launch, folder, warn)
    except NothingLeftError as all_done:
        if launch.rank == 0:
            # The run may have been killed after its last save, while it deleted an older one.
            clean_up(folder.checkpoints)
            print(shown(str(all_done)))
        return

    from megastable.training.build import train  # loads torch and deepspeed

    train(start, launch, folder, lock)


def _refuse_other_nodes(error: RunFolderError) -> None:
    """End the ranks of other nodes, which would wait for rank 0: its launcher may not end them."""
    launch = Launch.detect(os.environ)
    if not launch.single_node:
        from megastable.engine.process_group import refuse_other_ranks

        refuse_other_ranks(launch, str(error))


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
    elif fault.endswith("expected one argument"):
        hint = "; one that begins with a dash is written with an equals sign, e.g. --run-dir=-one"
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
