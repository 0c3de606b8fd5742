"""What may go: never the newest that is safe, nothing without a newer one that is, and no more than was asked for."""

from __future__ import annotations

import math
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.checkpoints.folder import complete_manifest, folder_name, step_folders, step_of
from megastable.checkpoints.thinning import SavedStep, space_fault, steps_to_delete, thin, what_stays
from megastable.config import CheckpointConfig
from tests.unit.checkpoints.checkpoint_examples import FIRST, make_checkpoint, make_partial

steps = st.integers(0, 40)
losses = st.none() | st.sampled_from([1.0, 1.5, 2.0, math.nan, math.inf])
saves = st.lists(st.builds(SavedStep, steps, losses), unique_by=lambda entry: entry.step, max_size=15)
few = st.none() | st.integers(1, 4)
keeps = st.builds(CheckpointConfig, keep_last=few, keep_every=few, keep_best=few)


@given(saves, steps, keeps)
def test_what_is_deleted_has_a_newer_safe_one_and_is_asked_for_by_no_key(
    saved: list[SavedStep], verified_step: int, keep: CheckpointConfig
) -> None:
    deleted = steps_to_delete(saved, verified_step, keep)
    left = [entry for entry in saved if entry.step not in deleted]
    assert deleted == sorted(set(deleted))
    assert set(deleted) <= {entry.step for entry in saved}
    assert all(step < verified_step for step in deleted)
    if deleted:
        assert verified_step in {entry.step for entry in left}
        assert keep.keep_last is not None
    older = [entry.step for entry in saved if entry.step <= verified_step]
    assert not set(deleted) & set(sorted(older)[-(keep.keep_last or 1) :])
    assert not any(step % keep.keep_every == 0 for step in deleted if keep.keep_every)
    # No one that is gone is better than one of the best that are left.
    gone = [entry.eval_loss for entry in saved if entry.step in deleted and is_evaluated(entry)]
    best_left = sorted(entry.eval_loss or 0.0 for entry in left if is_evaluated(entry))[: keep.keep_best or 0]
    assert all(loss is not None and loss >= best_left[-1] for loss in gone if best_left)
    assert len(best_left) == (keep.keep_best or 0) or not gone


def is_evaluated(entry: SavedStep) -> bool:
    """Whether a checkpoint has a loss that can be the best."""
    return entry.eval_loss is not None and math.isfinite(entry.eval_loss)


@given(saves, steps, keeps)
def test_no_more_is_left_than_was_asked_for(saved: list[SavedStep], verified_step: int, keep: CheckpointConfig) -> None:
    if keep.keep_last is None or verified_step not in {entry.step for entry in saved}:
        assert steps_to_delete(saved, verified_step, keep) == []
        return
    deleted = steps_to_delete(saved, verified_step, keep)
    left = {entry.step for entry in saved if entry.step <= verified_step} - set(deleted)
    multiples = {step for step in left if keep.keep_every and step % keep.keep_every == 0}
    assert len(left - multiples) <= keep.keep_last + (keep.keep_best or 0)
    # Once is enough.
    assert steps_to_delete([entry for entry in saved if entry.step not in deleted], verified_step, keep) == []


def test_a_loss_that_is_not_finite_is_never_the_best() -> None:
    saved = [
        SavedStep(10, 2.0),
        SavedStep(20, math.nan),
        SavedStep(30, -math.inf),
        SavedStep(40, None),
        SavedStep(50, 3),
    ]
    keep = CheckpointConfig(keep_last=1, keep_best=1)
    assert steps_to_delete(saved, 50, keep) == [20, 30, 40]


class Example(NamedTuple):
    """Settings, and what is left of checkpoints at 10, 20 … 60 with validation losses of 3, 1, 2, 5, 4 and 6."""

    keep: dict[str, Any]
    left: list[int]


@pytest.mark.parametrize(
    "example",
    [
        Example({}, [10, 20, 30, 40, 50, 60]),
        Example({"keep_last": 1}, [60]),
        Example({"keep_last": 2}, [50, 60]),
        Example({"keep_last": 9}, [10, 20, 30, 40, 50, 60]),
        Example({"keep_last": 1, "keep_every": 30}, [30, 60]),
        Example({"keep_last": 1, "keep_best": 1}, [20, 60]),
        Example({"keep_last": 1, "keep_best": 2}, [20, 30, 60]),
        Example({"keep_last": 2, "keep_every": 20, "keep_best": 1}, [20, 30, 40, 50, 60]),
    ],
    ids=str,
)
def test_folders_are_thinned(tmp_path: Path, example: Example) -> None:
    for step, loss in zip(range(10, 70, 10), (3.0, 1.0, 2.0, 5.0, 4.0, 6.0), strict=True):
        make_checkpoint(tmp_path, step, eval_loss=loss)
    before = {step_of(folder) for folder in step_folders(tmp_path)}
    deleted = thin(tmp_path, 60, CheckpointConfig(**example.keep))
    assert deleted == [tmp_path / folder_name(step) for step in sorted(before - set(example.left))]
    assert {path.name for path in tmp_path.iterdir()} == {folder_name(step) for step in example.left}


def test_it_is_said_what_stays() -> None:
    assert what_stays(CheckpointConfig()) == ""
    assert what_stays(CheckpointConfig(keep_last=3)) == "; of these stay the newest 3"
    assert what_stays(CheckpointConfig(keep_last=1, keep_every=1000, keep_best=2)) == (
        "; of these stay the newest 1 and those at multiples of 1,000 steps and the 2 of the lowest validation loss"
    )


def test_nothing_goes_before_the_newer_one_is_safe(tmp_path: Path) -> None:
    keep = CheckpointConfig(keep_last=1)
    for step in (10, 20):
        make_checkpoint(tmp_path, step)
    assert thin(tmp_path, 30, keep) == []
    make_partial(tmp_path, 30)
    assert thin(tmp_path, 30, keep) == []
    damaged = make_checkpoint(tmp_path, 40)
    (damaged / FIRST).unlink()
    assert thin(tmp_path, 40, keep) == []
    assert len(step_folders(tmp_path)) == 3


def test_a_damaged_one_is_neither_counted_nor_deleted(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        make_checkpoint(tmp_path, step)
    for step in (20, 30):
        (tmp_path / folder_name(step) / FIRST).unlink()
    assert thin(tmp_path, 40, CheckpointConfig(keep_last=2)) == []
    assert thin(tmp_path, 40, CheckpointConfig(keep_last=1)) == [tmp_path / folder_name(10)]
    assert [step_of(folder) for folder in step_folders(tmp_path)] == [40, 30, 20]


@settings(max_examples=15, deadline=None)
@given(saves, keeps)
def test_thinning_after_every_save_leaves_whole_checkpoints_the_newest_among_them(
    saved: list[SavedStep], keep: CheckpointConfig
) -> None:
    expected: list[SavedStep] = []
    with tempfile.TemporaryDirectory() as name:
        for entry in sorted(saved, key=lambda entry: entry.step):
            newest = make_checkpoint(Path(name), entry.step, eval_loss=entry.eval_loss)
            thin(Path(name), entry.step, keep)
            # Of the folders not all are read; the answer is that of reading all of them.
            expected.append(entry)
            gone = steps_to_delete(expected, entry.step, keep)
            expected = [other for other in expected if other.step not in gone]
            left = step_folders(Path(name))
            assert [step_of(folder) for folder in left] == [other.step for other in reversed(expected)]
            assert left[0] == newest
            for folder in left:
                complete_manifest(folder)


def usage_of(total: int, free: int) -> Any:
    """Stand in for a disk."""
    return lambda folder: SimpleNamespace(total=total, used=total - free, free=free)


def test_a_disk_that_is_too_full_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = shutil.disk_usage(tmp_path).free
    assert space_fault(tmp_path, 0) is None
    assert space_fault(tmp_path, free // 2) is None
    fault = space_fault(tmp_path, 10**18)
    assert fault is not None
    assert fault.startswith(f"{tmp_path} has ")
    assert fault.endswith("bytes free, and a checkpoint takes 1,000,000,000,000,000,000")
    monkeypatch.setattr(shutil, "disk_usage", usage_of(total=10, free=4))
    assert space_fault(tmp_path, 4) is None
    assert space_fault(tmp_path, 5) == f"{tmp_path} has 4 bytes free, and a checkpoint takes 5"


def test_a_disk_that_does_not_tell_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert space_fault(tmp_path / "no such folder", 10**18) is None
    monkeypatch.setattr(shutil, "disk_usage", usage_of(total=0, free=0))
    assert space_fault(tmp_path, 10**18) is None
