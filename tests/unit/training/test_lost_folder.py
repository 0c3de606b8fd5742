"""What is removed under a run is begun anew and said once; what another run has taken over is left alone."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megastable.core.records import Event, TrainingState
from megastable.training.console import PlainLines
from megastable.training.recorder import Recorder
from megastable.training.run_folder import RunFolder
from megastable.training.run_lock import RunLock
from tests.unit.training.metrics_examples import step_metrics


class NoWriters:
    """Stands for DeepSpeed's writers, of which none is enabled."""

    enabled = False

    def write_events(self, event_list: object) -> None:
        """Write nothing."""


class Run:
    """Records steps as the loop does."""

    def __init__(self, paths: RunFolder) -> None:
        self.paths = paths
        self.lock = RunLock.take(paths)
        assert self.lock.begin_writing() is None
        self.write_config()
        self.recorder = Recorder(paths, self.lock, self.write_config, NoWriters(), PlainLines(99, 1))
        self.step = 0

    def write_config(self) -> None:
        """Write what names the run."""
        self.paths.path.mkdir(parents=True, exist_ok=True)
        self.paths.config.write_text("the run")

    def do_step(self) -> str | None:
        """Record a step, and an event; returns why the run has to stop, which it does not."""
        self.step += 1
        reason = self.recorder.look_after_folder(TrainingState(step=self.step, consumed_samples=10 * self.step))
        if reason is None:
            self.recorder.record(step_metrics(step=self.step))
            self.recorder.record_event(Event(self.step, self.step, "ramp", "text", {}))
        return reason


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Start a run that has done two steps."""
    started = Run(RunFolder(tmp_path / "runs" / "run"))
    with started.lock, started.recorder:
        for _ in range(2):
            assert started.do_step() is None
        yield started


def rows(path: Path, kind: str = "") -> list[dict[str, Any]]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [row for row in found if not kind or row["kind"] == kind]


def remove_folder(paths: RunFolder) -> None:
    shutil.rmtree(paths.path)


def remove_folder_above(paths: RunFolder) -> None:
    shutil.rmtree(paths.path.parent)


def rename_folder(paths: RunFolder) -> None:
    paths.path.rename(paths.path.with_name("renamed"))


def empty_folder(paths: RunFolder) -> None:
    shutil.rmtree(paths.path)
    paths.path.mkdir()


def put_a_file_above(paths: RunFolder) -> None:
    """Leave no folder in the place, and nothing where one could be made, for a while."""
    shutil.rmtree(paths.path.parent)
    paths.path.parent.touch()


ALL_FILES = ["metrics.jsonl", "events.jsonl", "config.json", "run.lock"]


@pytest.mark.parametrize("remove", [remove_folder, remove_folder_above, rename_folder, empty_folder])
def test_a_folder_that_vanishes_is_made_again_and_said_once(
    run: Run, remove: Callable[[RunFolder], None], capfd: pytest.CaptureFixture[str]
) -> None:
    remove(run.paths)
    for _ in range(3):
        assert run.do_step() is None
    assert [row["step"] for row in rows(run.paths.metrics)] == [3, 4, 5]
    (lost,) = rows(run.paths.events, "files_lost")
    assert (lost["step"], lost["consumed_samples"], lost["data"]) == (3, 30, {"files": ALL_FILES})
    assert run.paths.config.read_text() == "the run"
    printed = capfd.readouterr()
    text = f"removed under the run in {run.paths.path}, and begun anew: {', '.join(ALL_FILES)}"
    assert printed.out.count(f"step 3 files_lost: {text}\n") == 1 and printed.err == ""


def test_a_renamed_folder_keeps_what_was_written_before(run: Run) -> None:
    renamed = RunFolder(run.paths.path.with_name("renamed"))
    rename_folder(run.paths)
    assert run.do_step() is None
    assert [row["step"] for row in rows(renamed.metrics)] == [1, 2]


@pytest.mark.parametrize("name", ALL_FILES)
@pytest.mark.parametrize("replace", [False, True])
def test_a_single_file_that_vanishes_is_named(run: Run, name: str, replace: bool) -> None:
    path = run.paths.path / name
    content = path.read_bytes()
    path.unlink()
    if replace:  # as an editor does, or a copy from elsewhere
        (run.paths.path / "copy").write_bytes(content)
        (run.paths.path / "copy").rename(path)
    for _ in range(2):
        assert run.do_step() is None
    events = rows(run.paths.events, "files_lost")
    is_the_same = replace and name in ("run.lock", "config.json")
    assert [event["data"]["files"] for event in events] == ([] if is_the_same else [[name]])
    kept = [1, 2] if replace or name != "metrics.jsonl" else []
    assert [row["step"] for row in rows(run.paths.metrics)] == [*kept, 3, 4]


def test_a_folder_that_cannot_be_made_again_costs_no_line_from_then_on(
    run: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    put_a_file_above(run.paths)
    for _ in range(3):
        assert run.do_step() is None
    run.paths.path.parent.unlink()
    assert run.do_step() is None
    assert [row["step"] for row in rows(run.paths.metrics)] == [3, 4, 5, 6]
    assert [row["step"] for row in rows(run.paths.events, "files_lost")] == [6]
    errors = capfd.readouterr().err.splitlines()
    for path in (run.paths.metrics, run.paths.events):
        assert [line.removeprefix(f"[megastable] {path} ") for line in errors if str(path) in line] == [
            "cannot be written (Not a directory); the run goes on and keeps its lines",
            "can be written again",
        ]
    assert len(errors) == 4


@pytest.mark.parametrize("fails", [False, True])
def test_a_run_whose_folder_was_taken_over_writes_no_more(
    run: Run, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fails:  # lines that wait to be written are not written into another run's files either
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", lambda descriptor, data: os.close(-1))
            assert run.do_step() is None
    remove_folder(run.paths)
    with RunLock.take(run.paths) as other:
        assert other.begin_writing() is None
        run.paths.metrics.write_text('{"step": 100}\n')
        before = {path: path.read_bytes() for path in run.paths.path.iterdir()}
        reason = run.do_step()
        assert reason is not None and f"{run.paths.path} was taken over by another run, process {os.getpid()}" in reason
        run.recorder.__exit__(None, None, None)
        run.lock.release()
        assert {path: path.read_bytes() for path in run.paths.path.iterdir()} == before
