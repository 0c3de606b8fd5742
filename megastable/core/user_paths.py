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


def pair_prefix(path: str, option: str) -> Path:
    """Return the path of a pair of Megatron's indexed format without ``.bin`` and ``.idx``, which may be given with it.

    Args:
        option: what a message calls the place where the path was given.

    Raises:
        UserError: the path ends with a folder.
    """
    prefix = expanded(path)
    if path.endswith("/") or prefix.name in ("", ".."):
        example = prefix / "NAME"
        raise UserError(f"{option}: {path!r} is a folder; legal is a pair in it: {example}, of {example}.bin and .idx")
    return prefix.with_suffix("") if prefix.suffix in (".bin", ".idx") else prefix
