"""Text files as documents: which files of a folder are documents, and reading them as they are."""

from __future__ import annotations

import codecs
import fnmatch
import glob
import hashlib
import os
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from megastable.config import StdlibSourceConfig, TextSourceConfig
from megastable.core.errors import UserError
from megastable.core.user_paths import expanded

NOT_LIBRARY_CODE = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"})
"""Folders under the standard library that hold other packages, tests, or what some distributions leave out."""
NO_DOCUMENTS = "__pycache__"
"""Compiled code, which every folder of Python sources has."""
HEAD_BYTES = 8192
"""Formats other than text show themselves long before: most of them in the first four bytes."""


class TextFiles:
    """One document a file, UTF-8, in the order of the names relative to ``root``. Empty files are left out."""

    def __init__(self, root: Path, files: Sequence[Path], name: str, remarks: Sequence[str] = ()) -> None:
        """Take the files that have text, in order.

        Args:
            remarks: lines that tell the user which files were left out before.

        Raises:
            UserError: no file is left, or one cannot be looked at.
        """
        self.name = name
        found = with_text(FoundFiles(root, files, remarks), name)
        self._root = root
        self._remarks = found.remarks
        self._files = found.files

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> str:
        file = self._files[index]
        try:
            # Without a translation of line ends: a carriage return, as a byte order mark, is part of the text.
            with file.open(encoding="utf-8", newline="") as opened:
                return opened.read()
        except UnicodeDecodeError as error:
            raise UserError(
                f"megastable.data.source.path: {file} is not UTF-8 text (byte {error.start:,}); "
                "convert it, or name the text files alone with a glob such as folder/**/*.txt"
            ) from error
        except OSError as error:
            _refuse_unreadable(file, error)

    def place(self, index: int) -> str:
        """Return where a document stands, for a report."""
        return str(self._files[index])

    def num_bytes(self) -> int:
        """Return the size of all files together."""
        return sum(_status(file).st_size for file in self._files)

    def remarks(self) -> Sequence[str]:
        """Say how many files were left out, and why."""
        return self._remarks

    def fingerprint(self) -> str:
        """Hash every file's name, size and time of change."""
        return files_fingerprint(self._root, self._files)


@dataclass(frozen=True)
class FoundFiles:
    """The files that a path of a run file names."""

    root: Path
    """What their names are relative to."""
    files: Sequence[Path]
    remarks: Sequence[str]
    """Lines for the user on what was left out."""


def with_text(found: FoundFiles, name: str) -> FoundFiles:
    """Sort files by their names relative to the root, without those that are empty, which a remark counts.

    Raises:
        UserError: no file is left, or one cannot be looked at.
    """
    in_order = sorted(found.files, key=lambda file: file.relative_to(found.root).parts)
    empty = [file for file in in_order if _status(file).st_size == 0]
    remarks = (*found.remarks, *_remark(empty, "empty files"))
    left_out = frozenset(empty)
    files = [file for file in in_order if file not in left_out]
    if not files:
        raise UserError(
            f"megastable.data.source.path: {name} has no text: there is no file, or all are empty"
            + "".join(f"; {remark}" for remark in remarks)
        )
    return FoundFiles(found.root, files, remarks)


def files_fingerprint(root: Path, files: Sequence[Path]) -> str:
    """Hash every file's name, size and time of change: to read terabytes to find them unchanged takes too long."""
    digest = hashlib.sha256()
    for file in files:
        status = _status(file)
        digest.update(f"{file.relative_to(root)}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def open_stdlib(_: StdlibSourceConfig) -> TextFiles:
    """Open the source code of the Python that runs this."""
    root = Path(sysconfig.get_path("stdlib"))
    files: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        # Assigned in place, so that the walk stays out of them: site-packages can hold 100,000 files.
        subfolders[:] = [name for name in subfolders if name not in NOT_LIBRARY_CODE]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    # Empty modules are a part of it that nobody misses.
    return TextFiles(root, [file for file in files if _status(file).st_size > 0], name=str(root))


def open_text(spec: TextSourceConfig) -> TextFiles:
    """Open a file, a folder with all its subfolders, or what a glob matches."""
    found = find_files(spec.path, _begins_as_text, "files that are no UTF-8 text")
    return TextFiles(found.root, found.files, spec.path, found.remarks)


def find_files(named: str, is_document: Callable[[Path], bool], what_is_left_out: str) -> FoundFiles:
    """List a file, the files of a folder with all its subfolders, or what a glob matches.

    Args:
        is_document: chooses among the files of a folder; a file that is named or matched is always taken.
        what_is_left_out: says which files of a folder are not taken, for a remark.

    Raises:
        UserError: there is nothing of this name, or it cannot be looked at.
    """
    path = expanded(named)
    # What exists is meant by its own name, even where the name has a bracket or star in it.
    if path.is_file():
        return FoundFiles(path.parent, [path], ())
    if path.is_dir():
        found, dangling = _files_below(path)
        files = [file for file in found if is_document(file)]
        left_out = sorted(set(found) - set(files))
        remarks = [
            *_remark(left_out, what_is_left_out),
            *_remark(dangling, "links and special files that lead to no file"),
        ]
        return FoundFiles(path, files, remarks)
    matches = _matches_of(path)
    if not matches:
        what = "matches no file" if glob.has_magic(named) else "does not exist"
        raise UserError(f"megastable.data.source.path: {named} {what}; legal are a file, a folder or a glob")
    dangling = [match for match in matches if match.is_symlink() and not match.exists()]
    # Matches of one glob may lie anywhere, so their names count from the top.
    root = Path(path.anchor)
    remarks = _remark(dangling, "links that lead to no file")
    return FoundFiles(root, _each_once([match for match in matches if match.is_file()]), remarks)


def _files_below(root: Path, hidden: bool = False) -> tuple[list[Path], list[Path]]:
    """List the files in a folder, and what looks like a file and is none.

    Hidden files and folders, those of version control and editors, are left out unless ``hidden``. Links to folders
    are followed, but every folder is read once, under its own name where it is below ``root``: links may lead in
    circles.

    Raises:
        UserError: a folder cannot be read.
    """
    files: list[Path] = []
    dangling: list[Path] = []
    visited: set[tuple[int, int]] = set()
    # The root first and whole; then the links that were met, in order.
    pending = [root]
    while pending:
        for folder, subfolders, names in os.walk(pending.pop(0), onerror=_refuse_folder):
            status = _status(Path(folder))
            visible = sorted(name for name in subfolders if name != NO_DOCUMENTS)
            if (status.st_dev, status.st_ino) in visited:
                visible = []
                names = []
            if not hidden:
                visible = [name for name in visible if not name.startswith(".")]
                names = [name for name in names if not name.startswith(".")]
            visited.add((status.st_dev, status.st_ino))
            # Assigned in place: the walk goes on with these. It does not follow links by itself.
            subfolders[:] = visible
            pending += [Path(folder, name) for name in visible if Path(folder, name).is_symlink()]
            for file in (Path(folder, name) for name in names):
                (files if file.is_file() else dangling).append(file)
    return files, sorted(dangling)


def _matches_of(pattern: Path) -> list[Path]:
    """List what a glob matches, hidden names only where the pattern has them.

    Python's glob goes through links to folders at every ``**``, which in a circle of links takes for ever. So what
    follows the first ``**`` is matched against a walk that reads every folder once.
    """
    if "**" not in pattern.parts:
        return [Path(match) for match in glob.glob(str(pattern))]
    split = pattern.parts.index("**")
    tail = pattern.parts[split:]
    matches: list[Path] = []
    for base in glob.glob(str(Path(*pattern.parts[:split]))):
        files, dangling = _files_below(Path(base), hidden=any(part.startswith(".") for part in tail))
        matches += [file for file in files + dangling if _fits(file.relative_to(base).parts, tail)]
    return matches


def _fits(parts: tuple[str, ...], pattern: tuple[str, ...]) -> bool:
    """Tell whether a path fits a pattern, both in parts; ``**`` stands for any number of folders, or for a file."""
    if not pattern or not parts:
        return not parts and all(part == "**" for part in pattern)
    is_hidden = parts[0].startswith(".")
    if pattern[0] == "**":
        return _fits(parts, pattern[1:]) or (not is_hidden and _fits(parts[1:], pattern))
    if is_hidden and not pattern[0].startswith("."):
        return False
    return fnmatch.fnmatchcase(parts[0], pattern[0]) and _fits(parts[1:], pattern[1:])


def _each_once(matches: Sequence[Path]) -> list[Path]:
    """Take a file that is reached through several links once."""
    places: dict[tuple[str, str], Path] = {}
    # The shortest path first, which is the one without a link below the other.
    for match in sorted(matches, key=lambda path: (len(path.parts), path.parts)):
        places.setdefault((os.path.realpath(match.parent), match.name), match)
    return list(places.values())


def _begins_as_text(file: Path) -> bool:
    """Tell whether the first bytes of a file are UTF-8; an empty one is."""
    try:
        with file.open("rb") as opened:
            head = opened.read(HEAD_BYTES)
    except OSError as error:
        _refuse_unreadable(file, error)
    try:
        # Incremental, since the head of a longer file may end within a character.
        codecs.getincrementaldecoder("utf-8")().decode(head, final=len(head) < HEAD_BYTES)
    except UnicodeDecodeError:
        return False
    return True


def _remark(files: Sequence[Path], what: str) -> list[str]:
    return [f"left out {len(files):,} {what}, such as {files[0]}"] if files else []


def _status(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        _refuse_unreadable(path, error)


def _refuse_folder(error: OSError) -> NoReturn:
    # Without this the walk passes over what it may not read.
    _refuse_unreadable(Path(error.filename), error)


def _refuse_unreadable(path: Path, error: OSError) -> NoReturn:
    raise UserError(f"megastable.data.source.path: {path} cannot be read ({error.strerror})") from error
