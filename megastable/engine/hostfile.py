"""Notices that ``deepspeed`` went on without the hostfile that it was asked to read."""

from __future__ import annotations

import base64
import contextlib
import io
import json
from pathlib import Path

import psutil

from megastable.core.errors import UserError

NODE_LAUNCHER = "deepspeed.launcher.launch"
WORLD_INFO = "--world_info="


def check_hostfile() -> None:
    """Refuse a launch whose hostfile the launcher could not read.

    ``deepspeed`` only warns and goes on with this machine alone, so a typing error would train on one node without a
    sign. No variable carries the option. But the command starts its launcher of this node as a child, whose command
    line says on which machines it runs.

    Raises:
        UserError: the hostfile that was asked for is not a file, and the run is on this machine alone.
    """
    try:
        launcher = next((parent for parent in psutil.Process().parents() if runs_here_alone(parent.cmdline())), None)
        command = None if launcher is None else launcher.parent()
        if launcher is None or command is None:
            return
        hostfile = hostfile_asked_for(command.cmdline(), launcher.cmdline())
        # The path is relative to where the command was started.
        found = hostfile is None or Path(command.cwd(), hostfile).is_file()
    except psutil.Error:
        # A parent has ended or belongs to another user.
        return
    if not found:
        raise UserError(
            f"The launch asks for --hostfile {hostfile}, which is not a file here; "
            "deepspeed would train on this machine alone"
        )


def hostfile_asked_for(command: list[str], launcher: list[str]) -> str | None:
    """Return the hostfile that the ``deepspeed`` command names, however it is started and the option is spelled.

    DeepSpeed's own parser reads the command line: it takes abbreviations and glued values as well. Where the arguments
    begin is found by trying: after those of the interpreter or a wrapper, what is left has to name the very script and
    arguments that the launcher was given.
    """
    # Takes a second and is needed only below a `deepspeed` that runs on this machine alone.
    from deepspeed.launcher.runner import DLTS_HOSTFILE, parse_args

    for start in range(1, len(command)):
        # The parser prints its usage and exits where words are not its own.
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            try:
                options = parse_args(command[start:])
            except SystemExit:
                continue
        script = [options.user_script, *options.user_args]
        if launcher[-len(script) :] == script:
            # The default is a place that is looked at without being asked for.
            return None if options.hostfile == DLTS_HOSTFILE else str(options.hostfile)
    return None


def runs_here_alone(words: list[str]) -> bool:
    """Tell whether a command line is of DeepSpeed's launcher of a node, in a run on this machine alone."""
    if NODE_LAUNCHER not in words:
        return False
    info = next((word.removeprefix(WORLD_INFO) for word in words if word.startswith(WORLD_INFO)), "")
    try:
        machines = list(json.loads(base64.urlsafe_b64decode(info)))
    except ValueError:
        return False
    # So the command calls its own machine where it has no list of machines.
    return machines == ["localhost"]
