"""Reading a run folder that is being written: growth, half lines, a resume that goes back, files that are not there."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.cli import run_files
from megastable.cli.run_files import Row, RunReader, Tail, number
from megastable.config import load_run_file
from megastable.core.errors import UserError
from megastable.core.records import TrainingState
from megastable.planning.run_plan import RunPlan
from megastable.training.run_folder import RunFolder
from tests.unit.cli.watch_examples import (
    EVENTS,
    NOW_UNIX,
    QUICKSTART,
    metrics_row,
    state_of,
    write_config,
    write_rows,
)


@pytest.fixture
def metrics(tmp_path: Path) -> Path:
    """An empty metrics.jsonl."""
    path = tmp_path / "metrics.jsonl"
    path.touch()
    return path


def steps_in(reader: RunReader) -> list[int]:
    """The steps that are known after another look at the files."""
    return [row["step"] for row in reader.refresh(NOW_UNIX).steps]


@settings(max_examples=25, deadline=None)
@given(rows=st.lists(st.text()), cuts=st.lists(st.integers(0, 2000)))
def test_however_a_file_grows_every_whole_line_is_read_once(
    tmp_path_factory: pytest.TempPathFactory, rows: list[str], cuts: list[int]
) -> None:
    path = tmp_path_factory.mktemp("growing") / "metrics.jsonl"
    expected = [{"number": number, "text": text} for number, text in enumerate(rows)]
    written = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in expected).encode()
    tail = Tail(path)
    found: list[Row] = []
    for end in (*sorted(cuts), len(written)):
        path.write_bytes(written[:end])
        new, afresh = tail.read()
        assert not afresh
        assert len(found) + len(new) == written[:end].count(b"\n")
        found += new
    assert found == expected


def test_what_was_read_is_not_read_again(metrics: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen from the parsing: one line for every line that is new."""
    write_rows(metrics, map(metrics_row, range(1, 101)))
    reader = RunReader(metrics.parent)
    reader.refresh(NOW_UNIX)
    parsed: list[bytes] = []
    loads = json.loads

    def loads_and_counts(line: bytes) -> object:
        parsed.append(line)
        return loads(line)

    monkeypatch.setattr("megastable.cli.run_files.json.loads", loads_and_counts)
    write_rows(metrics, [metrics_row(101)], mode="a")
    assert steps_in(reader) == list(range(1, 102))
    assert steps_in(reader) == list(range(1, 102))
    assert len(parsed) == 1


@pytest.mark.parametrize("kept", [0, 1, 5, 9, 10])
@pytest.mark.parametrize("written_again", [0, 1, 5, 20])
def test_a_resume_that_goes_back_is_followed(metrics: Path, kept: int, written_again: int) -> None:
    """As a resume does it: the folder's own code cuts the file back, then the steps come again with other values."""
    write_rows(metrics, map(metrics_row, range(1, 11)))
    reader = RunReader(metrics.parent)
    assert steps_in(reader) == list(range(1, 11))
    RunFolder(metrics.parent).drop_lines_after(kept)
    again = [metrics_row(step, loss=1.0) for step in range(kept + 1, kept + 1 + written_again)]
    write_rows(metrics, again, mode="a")
    assert steps_in(reader) == list(range(1, kept + 1 + written_again))
    assert [row["loss"] for row in reader.state.steps][kept:] == [1.0] * written_again


@pytest.mark.parametrize("kept", [0, 1, 9])
def test_a_file_that_is_cut_in_place_is_read_from_its_beginning(metrics: Path, kept: int) -> None:
    write_rows(metrics, map(metrics_row, range(1, 11)))
    reader = RunReader(metrics.parent)
    reader.refresh(NOW_UNIX)
    lines = metrics.read_bytes().splitlines(keepends=True)
    os.truncate(metrics, len(b"".join(lines[:kept])))
    assert steps_in(reader) == list(range(1, kept + 1))


def test_steps_that_come_again_without_a_cut_replace_the_old_ones(metrics: Path) -> None:
    write_rows(metrics, [*map(metrics_row, range(1, 11)), *map(metrics_row, range(6, 8))])
    assert steps_in(RunReader(metrics.parent)) == list(range(1, 8))


@pytest.mark.parametrize("extra_lines", [0, 3])
def test_of_a_long_file_the_end_is_read(metrics: Path, monkeypatch: pytest.MonkeyPatch, extra_lines: int) -> None:
    write_rows(metrics, map(metrics_row, range(1, 101)))
    lines = metrics.read_bytes().splitlines(keepends=True)
    monkeypatch.setattr(run_files, "MOST_BYTES", len(b"".join(lines[90:])) + 1)
    reader = RunReader(metrics.parent)
    assert steps_in(reader) == list(range(91, 101))
    write_rows(metrics, map(metrics_row, range(101, 101 + extra_lines)), mode="a")
    assert steps_in(reader) == list(range(91, 101 + extra_lines))
    write_rows(metrics, map(metrics_row, range(201, 301)), mode="a")  # more than is read at once
    assert len(steps_in(reader)) < 20
    assert reader.state.newest["step"] == 300


def test_the_whole_of_a_long_file_is_read_where_it_is_asked_for(metrics: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rows(metrics, map(metrics_row, range(1, 101)))
    monkeypatch.setattr(run_files, "MOST_BYTES", 1000)
    reader = RunReader(metrics.parent, whole=True)
    assert steps_in(reader) == list(range(1, 101))
    write_rows(metrics, map(metrics_row, range(51, 61)))  # a resume replaced the file
    assert steps_in(reader) == list(range(51, 61))


@pytest.mark.parametrize("line", [b"", b"{", b"7", b"[]", b"null", b"\xff\xfe", b"\0\0\0", b"[" * 100_000, b'{"step":'])
def test_a_line_that_is_no_object_is_left_out(metrics: Path, line: bytes) -> None:
    write_rows(metrics, [metrics_row(1)])
    with open(metrics, "ab") as file:
        file.write(line + b"\n")
    write_rows(metrics, [metrics_row(2)], mode="a")
    assert steps_in(RunReader(metrics.parent)) == [1, 2]


@settings(max_examples=25, deadline=None)
@given(step=st.integers(0, 400), samples=st.integers(0, 8000))
def test_the_length_is_that_of_the_way_that_the_run_has_come(
    tmp_path_factory: pytest.TempPathFactory, step: int, samples: int
) -> None:
    """Not of the run file alone: a resume with another batch has led off its way."""
    folder = tmp_path_factory.mktemp("run")
    write_config(folder)
    write_rows(folder / "metrics.jsonl", [metrics_row(step, consumed_samples=samples)])
    length = state_of(folder).length
    assert length is not None
    run = load_run_file(QUICKSTART)
    if not run.megastable.training.goes_on(step, samples):
        assert (length.total_steps, length.total_samples) == (step, samples)
    else:
        assert length == RunPlan.of(run, 2, TrainingState(step, samples)).length


@pytest.mark.parametrize("value", ["7", -1, 7.5, True, None, 10**400, "\x1b"])
def test_counts_that_are_none_leave_the_length_of_the_file(tmp_path: Path, value: object) -> None:
    write_config(tmp_path)
    write_rows(tmp_path / "metrics.jsonl", [metrics_row(1, consumed_samples=value)])
    assert state_of(tmp_path).length == RunPlan.of(load_run_file(QUICKSTART), 2).length


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), "1", True, [], {}, 10**400, -(10**4000)])
def test_what_is_no_finite_number_is_none(value: object) -> None:
    assert number({"key": value}, "key") is None
    assert number({}, "key") is None
    assert number({"key": 0}, "key") == 0


@pytest.mark.parametrize("files", [(), ("events.jsonl",), ("checkpoints",)])
def test_a_folder_that_is_no_run_folder_is_refused(tmp_path: Path, files: tuple[str, ...]) -> None:
    for name in files:
        (tmp_path / name).touch()
    for path in (tmp_path, tmp_path / "not_there", *(tmp_path / name for name in files)):
        with pytest.raises(UserError, match=r"config\.json nor metrics\.jsonl"):
            RunReader(path)


def test_files_that_come_later_are_found_and_files_that_go_leave_what_was_read(tmp_path: Path) -> None:
    write_config(tmp_path)
    reader = RunReader(tmp_path)
    assert steps_in(reader) == []
    assert reader.state.faults == []
    write_rows(tmp_path / "metrics.jsonl", [metrics_row(1)])
    write_rows(tmp_path / "events.jsonl", EVENTS)
    assert steps_in(reader) == [1]
    assert list(reader.state.events) == EVENTS
    for path in tmp_path.iterdir():
        path.unlink()
    assert steps_in(reader) == [1]
    assert list(reader.state.events) == EVENTS
    assert "config.json cannot be read" in reader.state.faults[0]


def test_a_file_that_cannot_be_read_is_a_fault_until_it_can(tmp_path: Path) -> None:
    write_config(tmp_path)
    (tmp_path / "metrics.jsonl").mkdir()
    reader = RunReader(tmp_path)
    assert steps_in(reader) == []
    assert reader.state.faults == ["metrics.jsonl cannot be read: Is a directory"]
    (tmp_path / "metrics.jsonl").rmdir()
    write_rows(tmp_path / "metrics.jsonl", [metrics_row(1)])
    assert steps_in(reader) == [1]
    assert reader.state.faults == []


def test_a_config_of_another_version_is_a_fault_and_a_new_one_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"no_such_key": 1}')
    reader = RunReader(tmp_path)
    state = reader.refresh(NOW_UNIX)
    assert state.run is None
    assert "no_such_key" in state.faults[0]
    write_config(tmp_path)
    assert reader.refresh(NOW_UNIX).run == load_run_file(QUICKSTART)
    assert state.faults == []


def test_length_and_layout_are_those_of_the_plan(tmp_path: Path) -> None:
    write_config(tmp_path)
    write_rows(tmp_path / "metrics.jsonl", [metrics_row(1, consumed_samples=8)])
    plan = RunPlan.of(load_run_file(QUICKSTART), world_size=4)
    state = state_of(tmp_path)
    assert state.length == plan.length
    assert state.layout == plan.layout


def test_time_left_is_the_samples_left_at_the_recent_pace(tmp_path: Path) -> None:
    write_config(tmp_path)
    slow_start = [metrics_row(step, step_seconds=1000.0) for step in range(1, 6)]
    write_rows(tmp_path / "metrics.jsonl", [*slow_start, *map(metrics_row, range(6, 101))])
    state = state_of(tmp_path)
    assert state.length is not None
    assert state.step_seconds == 0.5
    assert state.seconds_left == pytest.approx((state.length.total_samples - 1600) / 16 * 0.5)


def test_the_clock_of_the_watching_machine_tells_the_age_once_a_step_has_come(metrics: Path) -> None:
    write_rows(metrics, [metrics_row(1)])
    os.utime(metrics, (NOW_UNIX - 50, NOW_UNIX - 50))
    reader = RunReader(metrics.parent)
    assert reader.refresh(NOW_UNIX).newest_step_unix == NOW_UNIX - 50
    write_rows(metrics, [metrics_row(2)], mode="a")
    os.utime(metrics, (NOW_UNIX - 500, NOW_UNIX - 500))  # the writer's clock is behind
    assert reader.refresh(NOW_UNIX + 10).newest_step_unix == NOW_UNIX + 10
    assert reader.refresh(NOW_UNIX + 20).newest_step_unix == NOW_UNIX + 10
