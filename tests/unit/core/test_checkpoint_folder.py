"""Which checkpoints of a folder are complete: every kind of damage is found and named, and never resumed from."""

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.core.checkpoint_folder import (
    MANIFEST_NAME,
    PARTIAL_SUFFIX,
    Manifest,
    file_sizes,
    folder_name,
    newest_complete,
    publish,
    read_manifest,
    step_folders,
)
from megastable.core.errors import UserError

quick = settings(max_examples=15, deadline=None)  # no deadline: the machine may be busy

FILES = {
    "layer_00-model_states.pt": b"weights",
    "mp_rank_00_model_states.pt": b"engine state",
    "random_state/rank_0.pt": b"random",
    "empty": b"",
}


def make_checkpoint(checkpoints: Path, step: int) -> Path:
    """Write a complete checkpoint as the engine does: aside, the manifest last, then renamed."""
    aside = checkpoints / (folder_name(step) + PARTIAL_SUFFIX)
    for name, content in FILES.items():
        (aside / name).parent.mkdir(parents=True, exist_ok=True)
        (aside / name).write_bytes(content)
    manifest_of(step, aside).write(aside)
    return aside.rename(checkpoints / folder_name(step))


def manifest_of(step: int, folder: Path) -> Manifest:
    """Make the manifest that fits ``folder``."""
    return Manifest(
        state={"step": step, "consumed_samples": 8 * step},
        run={"megastable": {"training": {"seed": 1}}},
        corpus_fingerprint="abc",
        world_size=2,
        versions={"torch": "2.13.0"},
        files=file_sizes(folder),
    )


def damage_manifest(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    """Write what ``change`` makes of the manifest's values in its place."""

    def damage(folder: Path) -> None:
        path = folder / MANIFEST_NAME
        path.write_text(json.dumps(change(json.loads(path.read_text()))))

    return damage


def damage_text(text: str) -> Callable[[Path], None]:
    """Write ``text`` in the manifest's place."""

    def damage(folder: Path) -> None:
        (folder / MANIFEST_NAME).write_text(text)

    return damage


# Kind of damage -> how it is done, and what the message names.
DAMAGES = {
    "file missing": (lambda folder: (folder / "random_state/rank_0.pt").unlink(), "random_state/rank_0.pt"),
    "empty file missing": (lambda folder: (folder / "empty").unlink(), "empty"),
    "file cut short": (lambda folder: (folder / "layer_00-model_states.pt").write_bytes(b"weig"), "layer_00"),
    "file too long": (lambda folder: (folder / "layer_00-model_states.pt").write_bytes(b"weights!"), "layer_00"),
    "subfolder missing": (lambda folder: shutil.rmtree(folder / "random_state"), "random_state/rank_0.pt"),
    "no manifest": (lambda folder: (folder / MANIFEST_NAME).unlink(), MANIFEST_NAME),
    "manifest empty": (damage_text(""), MANIFEST_NAME),
    "manifest cut short": (damage_text('{"format_version": 1, "state": {"st'), MANIFEST_NAME),
    "manifest of zero bytes, as after a power cut": (damage_text("\0" * 300), MANIFEST_NAME),
    "manifest not UTF-8": (lambda folder: (folder / MANIFEST_NAME).write_bytes(b"\xff\xfe{}"), MANIFEST_NAME),
    "manifest a list": (damage_text("[]"), MANIFEST_NAME),
    "manifest without a version": (damage_manifest(lambda v: {k: v[k] for k in v if k != "format_version"}), "version"),
    "manifest without a key": (damage_manifest(lambda v: {k: v[k] for k in v if k != "files"}), "files"),
    "manifest with another key": (damage_manifest(lambda v: {**v, "more": 1}), "more"),
    "another format version": (damage_manifest(lambda v: {**v, "format_version": 2}), "format version 2"),
}
JSON_OF_ANOTHER_TYPE = {
    "manifest null": damage_text("null"),
    "manifest a number": damage_text("3"),
    "manifest a text": damage_text('"x"'),
    "files a list": damage_manifest(lambda v: {**v, "files": list(v["files"])}),
    "files null": damage_manifest(lambda v: {**v, "files": None}),
}
every_damage = pytest.mark.parametrize(
    ("damage", "named"),
    [
        *(pytest.param(*damage, id=name) for name, damage in DAMAGES.items()),
        *(pytest.param(damage, MANIFEST_NAME, id=name) for name, damage in JSON_OF_ANOTHER_TYPE.items()),
    ],
)


def test_a_complete_checkpoint_gives_back_its_manifest(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, 10)
    assert folder.name == "step_00000010"
    manifest = read_manifest(folder)
    assert manifest == manifest_of(10, folder)
    assert manifest.files == {name: len(content) for name, content in FILES.items()}


def test_a_file_that_came_later_does_no_harm(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, 10)
    before = read_manifest(folder)
    (folder / "notes.txt").write_text("the good one")
    assert read_manifest(folder) == before


@every_damage
def test_damage_is_named(tmp_path: Path, damage: Callable[[Path], None], named: str) -> None:
    folder = make_checkpoint(tmp_path, 10)
    damage(folder)
    with pytest.raises(UserError) as caught:
        read_manifest(folder)
    assert str(folder) in str(caught.value)
    assert named in str(caught.value)


@every_damage
def test_damage_makes_the_loader_fall_back_loudly(tmp_path: Path, damage: Callable[[Path], None], named: str) -> None:
    intact, damaged = make_checkpoint(tmp_path, 9), make_checkpoint(tmp_path, 10)
    damage(damaged)
    warnings: list[str] = []
    assert newest_complete(tmp_path, warnings.append) == intact
    (warning,) = warnings
    assert str(damaged) in warning
    assert "falling back" in warning


def test_a_newer_format_says_so_and_not_which_keys_it_does_not_know(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, 10)
    damage_manifest(lambda values: {**values, "format_version": 2})(folder)
    with pytest.raises(UserError, match=r"format version 2; this program reads 1"):
        read_manifest(folder)


def test_a_newer_format_with_other_keys_says_so_too(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, 10)
    damage_manifest(lambda values: {**values, "format_version": 2, "checksums": {}})(folder)
    with pytest.raises(UserError, match=r"format version 2; this program reads 1"):
        read_manifest(folder)


def test_a_folder_that_is_still_written_is_not_listed(tmp_path: Path) -> None:
    complete = make_checkpoint(tmp_path, 5)
    make_checkpoint(tmp_path, 6).rename(tmp_path / ("step_00000006" + PARTIAL_SUFFIX))
    (tmp_path / "step_00000007.partial").mkdir()
    warnings: list[str] = []
    assert newest_complete(tmp_path, warnings.append) == complete
    assert warnings == []


def test_only_step_folders_are_listed(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, 5)
    for name in ("latest", "step_12", "step_00000006_old", "xstep_00000006", "step_0000000a"):
        (tmp_path / name).mkdir()
    (tmp_path / "step_00000009").write_text("a file")
    assert step_folders(tmp_path) == [folder]


def test_nothing_to_resume_from(tmp_path: Path) -> None:
    warnings: list[str] = []
    assert newest_complete(tmp_path, warnings.append) is None
    assert newest_complete(tmp_path / "no such folder", warnings.append) is None
    assert warnings == []
    make_checkpoint(tmp_path, 5).joinpath(MANIFEST_NAME).unlink()
    assert newest_complete(tmp_path, warnings.append) is None
    assert len(warnings) == 1


@pytest.mark.parametrize(
    "steps",
    [
        (9, 10, 100),
        (99_999_998, 99_999_999),
        pytest.param(
            (99_999_999, 100_000_000),
        ),
    ],
)
def test_the_newest_is_that_of_the_highest_step_whichever_was_written_last(
    tmp_path: Path, steps: tuple[int, ...]
) -> None:
    folders = {step: make_checkpoint(tmp_path, step) for step in reversed(steps)}
    assert newest_complete(tmp_path, warn=print) == folders[max(steps)]


@quick
@given(st.dictionaries(st.integers(0, 10**8 - 1), st.booleans(), max_size=6), st.data())
def test_the_newest_intact_one_is_found_whatever_lies_above_it(intact: dict[int, bool], data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        folders = {step: make_checkpoint(Path(name), step) for step in intact}
        for step, is_intact in intact.items():
            if not is_intact:
                damage, _ = DAMAGES[data.draw(st.sampled_from(sorted(DAMAGES)))]
                damage(folders[step])
        newest = max((step for step in intact if intact[step]), default=-1)
        warnings: list[str] = []
        assert newest_complete(Path(name), warnings.append) == folders.get(newest)
        passed_over = sorted((step for step in intact if step > newest), reverse=True)
        assert len(warnings) == len(passed_over)
        for step, warning in zip(passed_over, warnings, strict=True):
            assert str(folders[step]) in warning


@quick
@given(st.sampled_from(sorted(FILES)), st.binary(max_size=20))
def test_a_file_of_another_size_is_found_whichever_it_is(name: str, content: bytes) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = make_checkpoint(Path(temporary), 1)
        (folder / name).write_bytes(content)
        if len(content) == len(FILES[name]):
            read_manifest(folder)
        else:
            with pytest.raises(UserError, match=name):
                read_manifest(folder)


def test_sizes_are_those_of_all_files_but_the_manifest(tmp_path: Path) -> None:
    (tmp_path / "b" / "c").mkdir(parents=True)
    for name, size in {"z": 1, "a": 2, "b/c/d": 3, MANIFEST_NAME: 4}.items():
        (tmp_path / name).write_bytes(b"x" * size)
    assert file_sizes(tmp_path) == {"z": 1, "a": 2, "b/c/d": 3}


def test_publishing_over_a_damaged_checkpoint_moves_it_aside(tmp_path: Path) -> None:
    for content in ("damaged", "damaged again", "whole"):
        partial = tmp_path / "step_00000020.partial"
        partial.mkdir()
        (partial / "weights").write_text(content)
        publish(partial, tmp_path / folder_name(20))
    assert (tmp_path / folder_name(20) / "weights").read_text() == "whole"
    assert [path.name for path in step_folders(tmp_path)] == [folder_name(20)]
