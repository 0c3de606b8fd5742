"""Which checkpoints of a folder are complete, and how one is published: nothing that is whole is lost."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.checkpoints.folder import (
    DAMAGED_SUFFIX,
    DELETING_SUFFIX,
    PARTIAL_SUFFIX,
    SUPERSEDED_SUFFIX,
    abandon_after,
    clean_up,
    complete_manifest,
    delete,
    delete_abandoned,
    folder_name,
    newest_complete,
    publish,
    step_folders,
)
from megastable.checkpoints.listing import look_at, newest_complete_of
from megastable.checkpoints.manifest import MANIFEST_NAME
from megastable.core.errors import UserError
from tests.unit.checkpoints.checkpoint_examples import FIRST, make_checkpoint, make_partial, manifest_of


def test_a_complete_checkpoint_gives_back_its_manifest(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, 10)
    assert folder.name == "step_00000010"
    assert complete_manifest(folder) == manifest_of(10, folder)


def test_a_file_that_came_later_does_no_harm(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, 10)
    (folder / "notes.txt").write_text("the good one")
    complete_manifest(folder)


def test_damaged_ones_are_passed_over_loudly(tmp_path: Path) -> None:
    intact, damaged = make_checkpoint(tmp_path, 9), make_checkpoint(tmp_path, 10)
    (damaged / FIRST).write_bytes(b"weig")
    warnings: list[str] = []
    assert newest_complete(tmp_path, warnings.append) == intact
    assert warnings == [f"{damaged} is damaged: {FIRST} has 4 bytes instead of 38; falling back to an older checkpoint"]


def test_many_faults_are_counted(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, 10)
    record = manifest_of(10, folder).files[FIRST]
    names = [f"rank_{rank:05d}.safetensors" for rank in range(20)]
    damaged = make_checkpoint(tmp_path, 11, files=dict.fromkeys(names, record))
    with pytest.raises(UserError, match=r"rank_00006.safetensors is missing, and 13 more faults$"):
        complete_manifest(damaged)


def test_a_folder_that_is_still_written_is_not_listed(tmp_path: Path) -> None:
    complete = make_checkpoint(tmp_path, 5)
    make_partial(tmp_path, 6)
    warnings: list[str] = []
    assert newest_complete(tmp_path, warnings.append) == complete
    assert warnings == []


def test_only_step_folders_are_listed(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, 5)
    others = (
        "latest",
        "step_12",
        "step_00000006_old",
        "xstep_00000006",
        "step_0000000a",
        "step_000000007",
        "step_\uff10\uff10\uff10\uff10\uff10\uff10\uff10\uff18",
    )
    for name in others:
        (tmp_path / name).mkdir()
    (tmp_path / "step_00000009").write_text("a file")
    (tmp_path / "step_00000011").symlink_to("step_00000011")
    assert step_folders(tmp_path) == [folder]


def test_nothing_to_resume_from(tmp_path: Path) -> None:
    warnings: list[str] = []
    assert newest_complete(tmp_path, warnings.append) is None
    assert newest_complete(tmp_path / "no such folder", warnings.append) is None
    (tmp_path / "file").write_text("")
    assert newest_complete(tmp_path / "file", warnings.append) is None
    assert warnings == []
    make_checkpoint(tmp_path, 5).joinpath(MANIFEST_NAME).unlink()
    assert newest_complete(tmp_path, warnings.append) is None
    assert len(warnings) == 1


@pytest.mark.parametrize("steps", [(9, 10, 100), (99_999_998, 99_999_999), (99_999_999, 100_000_000)])
def test_the_newest_is_that_of_the_highest_step_whichever_was_written_last(
    tmp_path: Path, steps: tuple[int, ...]
) -> None:
    folders = {step: make_checkpoint(tmp_path, step) for step in reversed(steps)}
    assert newest_complete(tmp_path, warn=print) == folders[max(steps)]
    assert step_folders(tmp_path) == [folders[step] for step in reversed(steps)]


def names_in(folder: Path) -> set[str]:
    """What lies in a folder."""
    return {path.name for path in folder.iterdir()}


def test_publishing_over_a_damaged_checkpoint_keeps_the_last_of_them(tmp_path: Path) -> None:
    final = tmp_path / folder_name(20)
    for loss in (1.0, 2.0, 3.0):
        publish(make_partial(tmp_path, 20, loss=loss), final)
        if loss < 3:
            (final / FIRST).unlink()
    assert complete_manifest(final).loss == 3
    assert names_in(tmp_path) == {final.name, final.name + DAMAGED_SUFFIX}
    assert '"loss": 2.0' in (tmp_path / (final.name + DAMAGED_SUFFIX) / MANIFEST_NAME).read_text()


def test_a_whole_checkpoint_is_replaced_by_another_of_its_step_and_never_called_damaged(tmp_path: Path) -> None:
    final = make_checkpoint(tmp_path, 20, loss=1.0)
    publish(make_partial(tmp_path, 20, loss=2.0), final)
    assert complete_manifest(final).loss == 2
    assert names_in(tmp_path) == {final.name}


def test_a_death_between_the_renames_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    final = make_checkpoint(tmp_path, 20, loss=1.0)
    partial = make_partial(tmp_path, 20, loss=2.0)
    renames: list[Path] = []

    def die_at_the_second(source: Path, target: Path) -> None:
        if renames:
            raise KeyboardInterrupt
        renames.append(Path(source).rename(target))

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(os, "replace", die_at_the_second)
        publish(partial, final)
    assert names_in(tmp_path) == {partial.name, final.name + SUPERSEDED_SUFFIX}
    restored, removed = clean_up(tmp_path)
    assert removed == f"removed {partial}, which a killed run left"
    assert restored.endswith("superseded was about to be replaced, and is step_00000020 again")
    assert complete_manifest(final).loss == 1
    assert names_in(tmp_path) == {final.name}
    assert clean_up(tmp_path) == []


def test_what_stands_is_not_replaced_by_what_it_has_replaced(tmp_path: Path) -> None:
    final = make_checkpoint(tmp_path, 20, loss=2.0)
    old = make_partial(tmp_path, 20, loss=1.0).rename(tmp_path / (final.name + SUPERSEDED_SUFFIX))
    assert clean_up(tmp_path) == [f"removed {old}, which a killed run left"]
    assert complete_manifest(final).loss == 2


def test_what_is_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    whole, damaged = make_checkpoint(tmp_path, 1), make_checkpoint(tmp_path, 2)
    (damaged / FIRST).unlink()
    others = [f"step_00000003{DAMAGED_SUFFIX}", "step_3.partial", "mine.partial", "step_00000003.partial.partial"]
    left = [f"step_00000004{PARTIAL_SUFFIX}", f"step_00000005{DELETING_SUFFIX}", f"step_00000006{PARTIAL_SUFFIX}"]
    for name in (*others, *left):
        (tmp_path / name / "inner").mkdir(parents=True)
    elsewhere = tmp_path / "mine.partial"
    (tmp_path / f"step_00000007{PARTIAL_SUFFIX}").symlink_to(elsewhere)
    (tmp_path / f"step_00000008{PARTIAL_SUFFIX}").write_text("")
    assert len(clean_up(tmp_path)) == 5
    assert names_in(tmp_path) == {whole.name, damaged.name, *others}
    assert (elsewhere / "inner").exists()
    complete_manifest(whole)


def test_there_may_be_nothing_to_clean_up(tmp_path: Path) -> None:
    assert clean_up(tmp_path) == []
    assert clean_up(tmp_path / "no such folder") == []


def test_a_deletion_that_is_killed_leaves_nothing_that_looks_like_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_checkpoint(tmp_path, 20)

    def die_after_one_file(path: Path, ignore_errors: bool) -> None:
        (path / FIRST).unlink(missing_ok=True)
        if path.exists():
            raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(shutil, "rmtree", die_after_one_file)
        delete(folder)
    assert names_in(tmp_path) == {folder.name + DELETING_SUFFIX}
    assert step_folders(tmp_path) == []
    # The step may be saved and deleted anew beside it.
    delete(make_checkpoint(tmp_path, 20))
    assert names_in(tmp_path) == set()


def test_a_file_in_the_place_of_a_checkpoint_is_moved_aside(tmp_path: Path) -> None:
    final = tmp_path / folder_name(20)
    final.write_text("notes")
    publish(make_partial(tmp_path, 20), final)
    complete_manifest(final)
    assert names_in(tmp_path) == {final.name, final.name + DAMAGED_SUFFIX}
    assert PARTIAL_SUFFIX not in "".join(names_in(tmp_path))


def test_what_a_run_has_gone_back_from_is_no_checkpoint_any_more(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        make_checkpoint(tmp_path, step)
    abandon_after(tmp_path, 10)
    assert [path.name for path in step_folders(tmp_path)] == [folder_name(10)]
    assert newest_complete(tmp_path, warn=print) == tmp_path / folder_name(10)
    # They go with the next whole save, and not before: until then they are the only ones of their steps.
    assert clean_up(tmp_path) == []
    assert len(list(tmp_path.iterdir())) == 3
    make_checkpoint(tmp_path, 20)
    abandon_after(tmp_path, 10)
    delete_abandoned(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [folder_name(10)]


@pytest.mark.parametrize(
    ("monitors", "sane_loss", "is_passed_over"),
    [
        ({"skipped_steps": {"consecutive_skips": 1}}, True, False),
        ({"skipped_steps": {"consecutive_skips": 2}}, False, True),
        ({"divergence": {"steps_above": 3}}, True, True),
        ({"divergence": {"steps_above": 3}}, False, False),
        ({"skipped_steps": {"consecutive_skips": "two"}, "divergence": {}}, True, False),
    ],
)
def test_a_checkpoint_of_a_run_in_trouble_is_passed_over_where_there_is_another(
    tmp_path: Path, monitors: dict[str, Any], sane_loss: bool, is_passed_over: bool
) -> None:
    make_checkpoint(tmp_path, 20, monitors=monitors)
    warnings: list[str] = []
    newest = tmp_path / folder_name(20)
    assert newest_complete(tmp_path, warnings.append, sane_loss=sane_loss) == newest
    make_checkpoint(tmp_path, 10)
    expected = tmp_path / folder_name(10) if is_passed_over else newest
    assert newest_complete(tmp_path, warnings.append, sane_loss=sane_loss) == expected
    # Alone it is looked past and taken all the same.
    assert len(warnings) == 3 * is_passed_over


@settings(deadline=None, max_examples=30)
@given(in_skips=st.lists(st.booleans(), min_size=1, max_size=4), damaged=st.sets(st.integers(0, 3)))
def test_a_resume_takes_what_the_listing_says_and_no_damage_hides_one_that_can_be_taken(
    in_skips: list[bool], damaged: set[int]
) -> None:
    with tempfile.TemporaryDirectory() as path:
        checkpoints = Path(path)
        steps = [10 * (number + 1) for number in range(len(in_skips))]
        for step, skips in zip(steps, in_skips, strict=True):
            make_checkpoint(checkpoints, step, monitors={"skipped_steps": {"consecutive_skips": 2 * skips}})
        whole = [number for number in range(len(steps)) if number not in damaged]
        passed_over = [checkpoints / folder_name(steps[number]) for number in damaged if number < len(steps)]
        taken = newest_complete(checkpoints, lambda text: None, passed_over=passed_over)
        good = [number for number in whole if not in_skips[number]]
        expected = max(good or whole, default=None)
        assert taken == (None if expected is None else checkpoints / folder_name(steps[expected]))
        for folder in passed_over:
            (folder / MANIFEST_NAME).unlink()
        listed = newest_complete_of([look_at(checkpoints / folder_name(step)) for step in steps])
        assert (None if listed is None else listed.path) == taken
