"""Paths as a user writes them, in a run file or on a command line."""

from __future__ import annotations

from pathlib import Path

from megastable.core.errors import UserError


def expanded(path: Path | str) -> Path:
    """Return the path with ``~`` and ``~name`` replaced by the home folder.

    Raises:
        UserError: this machine does not know the user, or the home of the one that runs.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise UserError(f"{path}: {error}; write the folder's whole path") from error
