"""A place where a run cannot write is refused by name, and nothing is written to find out."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from megastable.core.errors import UserError
from megastable.core.run_paths import RunPaths


def make_file(folder: Path) -> Path:
    (folder / "file").write_text("kept")
    return folder / "file"


def make_dangling_link(folder: Path) -> Path:
    (folder / "link").symlink_to(folder / "nothing")
    return folder / "link"


BAD_PLACES = {
    "a file": (make_file, "is not a folder"),
    "below a file": (lambda folder: make_file(folder) / "run", "lies below a file"),
    "far below a file": (lambda folder: make_file(folder) / "runs" / "run", "lies below a file"),
    "below a device": (lambda _: Path("/dev/null/run"), "lies below a file"),
    "a long name": (lambda folder: folder / ("x" * 300), "File name too long"),
    "a long path": (lambda folder: folder.joinpath(*["x" * 200] * 30), "File name too long"),
    "NUL": (lambda folder: folder / "a\0b", "no path can"),
    "a dangling link": (make_dangling_link, "link to what does not exist"),
    "read only": (lambda _: Path("/proc/run"), "cannot be written"),
}


@pytest.mark.parametrize("place", BAD_PLACES)
def test_a_bad_place_is_refused_by_name(tmp_path: Path, place: str) -> None:
    make, expected = BAD_PLACES[place]
    path = make(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match=expected) as caught:
        RunPaths(path).check_writable()
    assert str(caught.value).startswith("--run-dir: ")
    assert sorted(tmp_path.rglob("*")) == before


def test_missing_permission_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str, *_: object) -> None:
        assert Path(path).parent == tmp_path
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "mkdir", refuse)  # root may write everywhere
    with pytest.raises(UserError, match="Permission denied"):
        RunPaths(tmp_path / "runs" / "run").check_writable()


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl", "config.json"])
def test_folders_by_the_names_of_files_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(UserError, match=name):
        RunPaths(tmp_path).check_writable()


def test_good_places_pass_and_are_left_alone(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "new", tmp_path / "new folder" / "with" / "more"):
        RunPaths(path).check_writable()
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    RunPaths(tmp_path).check_writable()
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


def test_checkpoints_may_not_be_a_file(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(UserError, match="checkpoints"):
        RunPaths(tmp_path).check_writable()
