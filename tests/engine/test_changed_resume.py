"""Whole runs that go on as another layout, precision, batch or text than the checkpoint's, or start over nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from megastable.checkpoints.folder import folder_name, step_folders
from tests.support.launches import metrics, train_command, write_run_file
from tests.support.scripts import FinishedScript, run_script

BATCH = 4
SAVE_INTERVAL = 3
STEPS_BEFORE = 5
MIN_LR = 0.001
WRITERS = {"csv_monitor": {"enabled": True, "job_name": "job"}, "tensorboard": {"enabled": True, "job_name": "job"}}


def run(run_file: Path, run_dir: Path, *flags: str, world_size: int = 2) -> FinishedScript:
    """Train, and see that every rank ended well."""
    finished = run_script(train_command([], run_file, run_dir, *flags), world_size)
    assert finished.exit_codes == [0] * world_size, finished.output
    return finished


def refusal(run_file: Path, run_dir: Path, *flags: str) -> str:
    """Train on two stages, which is refused; returns what rank 0 said."""
    finished = run_script(train_command([], run_file, run_dir, *flags), world_size=2)
    assert finished.exit_codes[0] == 2 and "Traceback" not in finished.output, finished.output
    return finished.outputs[0]


def set_to(**values: Any) -> list[str]:
    """Return the flags that set keys, whose dots are written ``__``."""
    words = [("--set", f"{key.replace('__', '.')}={json.dumps(value)}") for key, value in values.items()]
    return [word for pair in words for word in pair]


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    """Return the events of a kind."""
    rows = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == kind]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train five steps on two stages, saved at the third alone; returns the folder of run file, text and run."""
    folder = tmp_path_factory.mktemp("trained")
    run_file = write_run_file(
        folder,
        megastable__batch_rampup={"final": BATCH},
        megastable__training={"total_samples": BATCH * STEPS_BEFORE, "seed": 7},
        megastable__checkpoint={"save_interval": SAVE_INTERVAL},
        megastable__lr_schedule={"type": "cosine", "warmup": 8, "min_lr": MIN_LR},
        **WRITERS,
    )
    run(run_file, folder / "run")
    (last, first) = step_folders(folder / "run" / "checkpoints")
    assert (last.name, first.name) == (folder_name(STEPS_BEFORE), folder_name(SAVE_INTERVAL))
    shutil.rmtree(last)
    return folder


@pytest.fixture
def copied(trained: Path, tmp_path: Path) -> tuple[Path, Path]:
    """Return the run file, and a copy of the run folder."""
    shutil.copytree(trained / "run", tmp_path / "run")
    return trained / "tiny.json", tmp_path / "run"


def test_another_layout_precision_and_batch_end_as_planned_and_every_step_stands_once(
    copied: tuple[Path, Path],
) -> None:
    """Two stages in fp32 go on as two replicas in bf16, whose batches end at sample 48 after 4, and not after 3."""
    run_file, run_dir = copied
    with open(run_dir / "metrics.jsonl", "ab") as file:
        file.write(b'7\nnull\n\xff\xfe\n{"step": 6')
    flags = set_to(
        megastable__pipeline__num_stages=1,
        bf16__enabled=True,
        megastable__batch_rampup__final=10,
        megastable__training__total_samples=48,
    )
    finished = run(run_file, run_dir, "--resume", *flags)
    rows = metrics(run_dir)
    samples = [4, 8, 12, 22, 32, 42, 52]
    assert [row["step"] for row in rows] == list(range(1, 8))
    assert [row["consumed_samples"] for row in rows] == samples
    assert rows[-1]["lr"] == MIN_LR < rows[-2]["lr"]
    assert "step 7/7" in finished.outputs[0]
    for name in ("loss", "lr", "global_batch_size"):
        lines = (run_dir / "csv_monitor" / "job" / f"Train_{name}.csv").read_text().splitlines()
        assert lines[0] == f"step,{name}"
        values = [tuple(map(float, line.split(","))) for line in lines[1:]]
        assert [value for samples_there, value in values] == pytest.approx([row[name] for row in rows])
        assert [samples_there for samples_there, value in values] == samples
    data = [event["data"] for event in events(run_dir, "changed")]
    changed = {values["key"]: (values["old"], values["new"]) for values in data}
    assert changed == {
        "data_parallel_size": (1, 2),
        "megastable.pipeline.num_stages": (2, 1),
        "bf16.enabled": (False, True),
        "megastable.batch_rampup.final": (4, 10),
        "megastable.training.total_samples": (20, 48),
    }
    for key, (old, new) in changed.items():
        assert finished.outputs[0].count(f"changed since the checkpoint: {key} was {old!r}, is {new!r}") == 1
    (set_aside,) = events(run_dir, "set_aside")
    assert "metrics.jsonl had 4 lines that cannot be read" in set_aside["text"]
    assert finished.outputs[0].count(set_aside["text"]) == 1


def test_one_line_serves_the_first_start_a_restart_and_the_end(trained: Path, tmp_path: Path) -> None:
    run_file, run_dir = trained / "tiny.json", tmp_path / "run"
    auto = ["--resume=auto"]
    finished = run(run_file, run_dir, *auto, *set_to(megastable__checkpoint__save_interval=None))
    assert "starts from fresh weights" in finished.outputs[0] and "[megastable]" not in finished.output
    lost = (run_dir / "metrics.jsonl").read_text()
    finished = run(run_file, run_dir, *auto)
    assert "saved no checkpoint: it starts again from step 0" in finished.outputs[0]
    assert (run_dir / "metrics.superseded.jsonl").read_text() == lost
    assert [row["step"] for row in metrics(run_dir)] == list(range(1, STEPS_BEFORE + 1))
    assert len((run_dir / "csv_monitor" / "job" / "Train_loss.csv").read_text().splitlines()) == 1 + STEPS_BEFORE
    assert len(events(run_dir, "restart")) == 1
    again = run(run_file, run_dir, *auto)
    assert again.output.count("nothing to do: ") == 1


def test_a_text_that_has_moved_continues_and_another_one_is_allowed_by_name(
    copied: tuple[Path, Path], trained: Path, tmp_path: Path
) -> None:
    run_file, run_dir = copied
    shutil.copytree(trained / "text", tmp_path / "moved")
    moved = set_to(megastable__data__source__path=str(tmp_path / "moved"))
    run(run_file, run_dir, "--resume", *moved)
    (changed,) = events(run_dir, "changed")
    assert changed["data"]["key"] == "megastable.data.source.path"
    assert [row["loss"] for row in metrics(run_dir)] == [row["loss"] for row in metrics(trained / "run")]

    (tmp_path / "moved" / "more.txt").write_text("a document that was not there before " * 20)
    longer = [*moved, *set_to(megastable__training__total_samples=28)]
    assert "--allow-change megastable.data" in refusal(run_file, run_dir, "--resume", *longer)
    finished = run(run_file, run_dir, "--resume", *longer, "--allow-change", "megastable.data")
    assert metrics(run_dir)[-1]["consumed_samples"] == 28
    *_, changed = events(run_dir, "changed")
    assert changed["data"]["key"] == "megastable.data (its tokens)"
    assert finished.outputs[0].count(changed["text"]) == 1


def test_what_is_refused_leaves_the_folder_as_it_was(copied: tuple[Path, Path]) -> None:
    run_file, run_dir = copied
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    for flags, expected in (
        (set_to(train_micro_batch_size_per_gpu=3), "global batch 4 (from sample 12) is not a multiple"),
        (set_to(megastable__model__hidden_size=64), "the weights are of the model that they were trained with"),
        (set_to(megastable__training__seed=8), "--allow-change megastable.training.seed allows it"),
    ):
        assert expected in refusal(run_file, run_dir, "--resume", *flags)
    lock = run_dir / "run.lock"
    assert {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file() and path != lock} == {
        path: content for path, content in before.items() if path != lock
    }
