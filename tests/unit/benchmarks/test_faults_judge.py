"""What the judge of killed runs finds: every kind of lost or wrong step, and nothing in a run that is good."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faults.judge import Reference, Verdict, judge
from faults.moments import left_by_a_save
from faults.samples import begun_steps, samples_of_run

from megastable.checkpoints.folder import folder_name
from tests.unit.checkpoints.checkpoint_examples import make_checkpoint

BATCH = 4
SAMPLES = {0: [0, 1, 2, 3], 4: [4, 5, 6, 7], 8: [8, 9, 10, 11], 12: [12, 13, 14, 15]}
ROWS = [
    {"step": step, "consumed_samples": BATCH * step, "lr": 0.1, "loss": 5.0 - step, "grad_norm": 1.0}
    for step in range(1, 5)
]
REFERENCE = Reference(ROWS, SAMPLES)


def write_rows(folder: Path, rows: list[dict[str, Any]]) -> None:
    """Write ``metrics.jsonl``."""
    (folder / "run" / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def record(folder: Path, start: int, rank: int, steps: dict[int, list[int]], replica: int = 0) -> None:
    """Write down what a rank of a start read."""
    path = folder / f"start_{start}" / f"record_{rank}.txt"
    path.parent.mkdir(exist_ok=True)
    lines = [f"{step} {replica} {sample}\n" for step, samples in steps.items() for sample in samples]
    path.write_text("".join(lines))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a run that died in its third step, on two replicas, and was resumed after the second on one."""
    make_checkpoint(tmp_path / "run" / "checkpoints", 4)
    write_rows(tmp_path, ROWS)
    for replica in (0, 1):
        half = slice(2 * replica, 2 * replica + 2)
        steps = {step: samples[half] for step, samples in SAMPLES.items() if step <= 4}
        # In its third step the last stage is not as far as the first.
        record(tmp_path, 0, replica, {**steps, 8: SAMPLES[8][half]}, replica)
        record(tmp_path, 0, 2 + replica, {**steps, 8: SAMPLES[8][half][:1]}, replica)
    record(tmp_path, 1, 0, {step: samples for step, samples in SAMPLES.items() if step >= 8})
    return tmp_path


def verdict_of(folder: Path) -> Verdict:
    """Judge the run."""
    verdict = Verdict()
    judge(folder / "run", [folder / "start_0", folder / "start_1"], REFERENCE, verdict)
    return verdict


def with_row(step: int, **values: Any) -> Callable[[Path], None]:
    """Return what changes the row of a step."""
    return lambda folder: write_rows(folder, [{**row, **values} if row["step"] == step else row for row in ROWS])


def test_a_run_that_was_killed_and_came_back_is_good(folder: Path) -> None:
    assert verdict_of(folder) == Verdict()
    with_row(2, loss=ROWS[1]["loss"] * (1 + 5e-6))(folder)
    verdict = verdict_of(folder)
    assert not verdict.lost and not verdict.wrong and verdict.largest_difference == pytest.approx(5e-6, rel=1e-3)


def damage_a_file(folder: Path) -> None:
    """Write something else into a file of the checkpoint."""
    next((folder / "run" / "checkpoints").glob("*/rank_*")).write_bytes(b"other")


LOST: dict[str, tuple[Callable[[Path], None], str]] = {
    "a step is missing": (lambda folder: write_rows(folder, ROWS[:1] + ROWS[2:]), "step 2 stands in metrics.jsonl 0"),
    "a step stands there twice": (lambda folder: write_rows(folder, ROWS[:2] + ROWS[1:]), "step 2 stands"),
    "a step too many": (lambda folder: write_rows(folder, [*ROWS, {**ROWS[3], "step": 5}]), "has the steps"),
    "in another order": (lambda folder: write_rows(folder, [ROWS[1], ROWS[0], *ROWS[2:]]), "has the steps"),
    "no metrics at all": (lambda folder: (folder / "run" / "metrics.jsonl").unlink(), "step 1 stands"),
}
WRONG: dict[str, tuple[Callable[[Path], None], str]] = {
    "another loss": (with_row(3, loss=2.0001), "step 3: loss is 2.0001 and not 2.0"),
    "another norm": (with_row(3, grad_norm=1.1), "step 3: grad_norm"),
    "a loss that is no number": (with_row(3, loss=None), "step 3: loss is None"),
    "another learning rate": (with_row(3, lr=0.11), "step 3: lr"),
    "another position": (with_row(3, consumed_samples=13), "step 3: consumed_samples"),
    "a sample twice": (
        lambda folder: record(folder, 1, 0, {8: [8, 9, 10, 10], 12: SAMPLES[12]}),
        "the step after 8 samples read [8, 9, 10, 10]",
    ),
    "samples that were left out": (
        lambda folder: shutil.rmtree(folder / "start_0"),
        "the step after 0 samples read None",
    ),
    "stages that read different samples": (
        lambda folder: record(folder, 1, 1, {8: [8, 9, 11, 10]}),
        "two ranks of replica 0 read",
    ),
    "a step that begins elsewhere": (
        lambda folder: record(folder, 1, 0, {8: SAMPLES[8], 10: [10], 12: SAMPLES[12]}),
        "a step began after 10 samples",
    ),
    "a damaged checkpoint": (
        damage_a_file,
        "is damaged",
    ),
    "no checkpoint": (lambda folder: shutil.rmtree(folder / "run" / "checkpoints" / folder_name(4)), "no checkpoint"),
    "something left by a save": (
        lambda folder: (folder / "run" / "checkpoints" / "step_00000006.partial").mkdir(),
        "step_00000006.partial was left",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", LOST)
def test_a_lost_step_is_found(folder: Path, fault: str) -> None:
    damage, expected = LOST[fault]
    damage(folder)
    assert any(expected in text for text in verdict_of(folder).lost)


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_step_is_found(folder: Path, fault: str) -> None:
    damage, expected = WRONG[fault]
    damage(folder)
    verdict = verdict_of(folder)
    assert any(expected in text for text in verdict.wrong), verdict


def test_of_a_step_that_was_repeated_the_last_start_counts(folder: Path) -> None:
    assert samples_of_run([folder / "start_0"])[8] == SAMPLES[8]
    assert samples_of_run([folder / "start_0", folder / "start_1"]) == SAMPLES
    assert begun_steps(folder / "start_0") == {0, 4, 8} and begun_steps(folder / "start_1") == {8, 12}
    assert begun_steps(folder / "start_2") == set()


def test_what_an_unfinished_save_leaves_is_told_from_a_finished_one(tmp_path: Path) -> None:
    for step in (2, 4):
        make_checkpoint(tmp_path, step)
    assert left_by_a_save(tmp_path, keep_last=2) == []
    assert left_by_a_save(tmp_path, keep_last=1) == [folder_name(2)]
    for suffix in ("partial", "superseded", "deleting"):
        (tmp_path / f"step_00000006.{suffix}").mkdir()
    assert len(left_by_a_save(tmp_path, keep_last=2)) == 3
