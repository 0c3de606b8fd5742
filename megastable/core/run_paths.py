"""The names of the files in a run's folder."""

from __future__ import annotations

import errno
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from megastable.core.errors import UserError


def default_run_dir(run_file: Path) -> Path:
    """Return the folder of a run whose command line names none."""
    return Path("runs") / run_file.stem


@dataclass(frozen=True)
class RunPaths:
    """Names what a run writes into its folder ``path``: the writer and the readers spell it here."""

    path: Path

    @property
    def config(self) -> Path:
        """Return the run file with its defaults filled in and every ``--set`` applied."""
        return self.path / "config.json"

    @property
    def metrics(self) -> Path:
        """Return the file with one JSON object for every step that was recorded."""
        return self.path / "metrics.jsonl"

    @property
    def events(self) -> Path:
        """Return the file with one JSON object for every event of a monitor."""
        return self.path / "events.jsonl"

    @property
    def checkpoints(self) -> Path:
        """Return the folder of the checkpoints, see ``checkpoints.folder``."""
        return self.path / "checkpoints"

    @property
    def lock(self) -> Path:
        """Return the file that names the process that writes the folder, or has written it last."""
        return self.path / "run.lock"

    @property
    def stop_switch(self) -> Path:
        """Return the file whose appearance asks the run to save and stop."""
        return self.path / "STOP"

    @property
    def save_switch(self) -> Path:
        """Return the file whose appearance asks the run to save."""
        return self.path / "SAVE"

    def check_writable(self) -> None:
        """Check that a run can write here, and leave nothing behind.

        Raises:
            UserError: the path is no folder and cannot become one, or is not for this user to write.
        """
        for folder in (self.path, self.checkpoints):
            fault = _fault_of_folder(folder)
            if fault is not None:
                raise UserError(f"--run-dir: {str(folder)!r} {fault}; name a folder that can be written")
        for file in (self.config, self.metrics, self.events):
            if file.is_dir() or (file.exists() and not os.access(file, os.W_OK)):
                raise UserError(f"--run-dir: {str(file)!r} cannot be written; name another folder")


def _fault_of_folder(folder: Path) -> str | None:
    """Say why ``folder`` cannot be written or made; None where it can."""
    try:
        os.stat(folder)
    except FileNotFoundError:
        if folder.is_symlink():
            return "is a link to what does not exist"
        # It can be made where the folder above can be written.
        return _fault_of_folder(folder.parent)
    except OSError as error:
        if error.errno == errno.ENOTDIR:
            return "lies below a file"
        return f"cannot be used ({error.strerror})"
    except ValueError:
        return "holds a character that no path can"
    if not folder.is_dir():
        return "is not a folder"
    # Only an attempt shows whether permissions, a read-only or full disk or a quota stand against it.
    try:
        tempfile.TemporaryDirectory(prefix=".megastable-", dir=folder).cleanup()
    except OSError as error:
        return f"cannot be written ({error.strerror})"
    return None
