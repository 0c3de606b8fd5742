"""What ``megastable watch`` draws: every value is there, whatever is missing, at every width."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from megastable.cli.run_drawings import COLUMNS, MARK
from megastable.cli.run_fields import STEP_FIELDS, WATCHED_FIELDS
from megastable.cli.run_files import RunState
from megastable.cli.tables import duration
from tests.unit.cli.test_cli import exit_of_main
from tests.unit.cli.watch_examples import EVENTS, LAYERS, frame, metrics_row, state_of, write_config, write_rows
from tests.unit.training.metrics_examples import HARD_STEPS, step_metrics

WIDTHS = (80, 120, 160)
NUM_STEPS = 30


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run folder with every file and every key."""
    folder = tmp_path / "my_run"
    folder.mkdir()
    write_config(folder)
    write_rows(folder / "metrics.jsonl", map(metrics_row, range(1, NUM_STEPS + 1)))
    write_rows(folder / "events.jsonl", EVENTS)
    return folder


def words(text: str) -> str:
    """The text without borders and line breaks, so that a sentence is found however it was wrapped."""
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", text).split())


SHOWN = (
    "my_run", "running, newest step 3 s ago",
    "model 4 layers, hidden 128, 4 heads, sequence 128, vocabulary 2048, fp32",
    "layout 2 stages x 2 replicas x 1 tensor ranks = 4 processes",
    "step 30 / 360", "samples 480 / 8,136 (5.9%)", "tokens 61,440", "left 3 min 59 s",
    "loss 4.7000, volatility 0.06250", "gradient norm 0.6250 before clipping", "clip coefficient 0.8750",
    "learning rate 3.00e-04", "loss scale 4,096", "skipped no; 0 of the last 30 steps",
    "batch 16 = 2 micro-batches of 4 x 2 replicas", "speed 4,321 tokens/s, 0.5 s a step",
    "TFLOPs 12.50 a device, 15.50 executed",
    "validation loss 4.7500 at step 30", "headroom 31.2% of fp32's maximum: attention logit 14.75 in block_1",
    "slowest rank rank 3 (stage 1, replica 1, tensor 0), busy 75.0% of the step",
    "memory host 7.5 GiB, device 70.5 GiB",
    "loss, last 30 steps", "gradient norm, last 30 steps", "4.990", "4.700",
    "1 ramp global batch 8 -> 16", "2 overflow infinite in [block_1] on rank 1",
    "layers at step 30", "embedding 0.1100 41.50 1.25e-04 3.250 - 87.5%",
    f"block_1 0.9600 {MARK} 43.50 1.75e-04 5.250 14.75 0.002%",
    "the worst: gradient norm of block_1, 7.68 times.",
)  # fmt: skip


@pytest.mark.parametrize("expected", SHOWN)
def test_every_value_is_shown(run_dir: Path, expected: str) -> None:
    assert expected in words(frame(state_of(run_dir), width=80))  # where no panel stands beside another


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_is_cut_or_too_wide(run_dir: Path, width: int) -> None:
    text = frame(state_of(run_dir), width)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    for label, _ in (*STEP_FIELDS, *WATCHED_FIELDS):
        assert label in text
    for name in LAYERS:
        assert re.search(rf"\b{name}  ", text)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("height", [10, 24, 60])
def test_a_low_terminal_keeps_the_layer_that_stands_out(run_dir: Path, width: int, height: int) -> None:
    layers = {f"block_{index}": {"grad_norm": 9.5 if index == 80 else 0.5} for index in range(100)}
    write_rows(run_dir / "metrics.jsonl", [metrics_row(NUM_STEPS, layers=layers)])
    rows = re.findall(r"block_\d+  ", frame(state_of(run_dir), width, height))
    assert "block_80  " in rows
    assert len(rows) <= height


@pytest.mark.parametrize("width", [120, 160])
def test_a_terminal_of_forty_lines_has_a_place_for_the_events(run_dir: Path, width: int) -> None:
    layers = {f"block_{index}": LAYERS["block_0"] for index in range(100)}
    write_rows(run_dir / "metrics.jsonl", [metrics_row(NUM_STEPS, layers=layers)])
    write_rows(run_dir / "events.jsonl", [*EVENTS, *EVENTS, EVENTS[0] | {"text": "long text " * 40}])
    lines = frame(state_of(run_dir), width, height=40).splitlines()
    assert len(lines) <= 40
    assert "long text" in words("\n".join(lines))


@pytest.mark.parametrize("key", metrics_row(1))
@pytest.mark.parametrize("change", ["absent", "null", "of another type"])
def test_any_key_of_a_step_may_be_missing(run_dir: Path, key: str, change: str) -> None:
    """In every step, so that no older one stands in for it."""
    rows = [metrics_row(step) for step in range(1, NUM_STEPS + 1)]
    for row in rows:
        row[key] = {"null": None, "of another type": "text"}.get(change)
        if change == "absent":
            del row[key]
    write_rows(run_dir / "metrics.jsonl", rows)
    for width in WIDTHS:
        text = frame(state_of(run_dir), width)
        assert "my_run" in text
        assert "overflow" in text
        if key != "loss":
            assert "4.7000" in text


@pytest.mark.parametrize("key", [column.key for column in COLUMNS])
@pytest.mark.parametrize("value", [None, "text"])
def test_any_value_of_a_layer_may_be_missing(run_dir: Path, key: str, value: object) -> None:
    layers: dict[str, Any] = {name: {**values, key: value} for name, values in LAYERS.items()}
    layers["block_0"] = {name: one for name, one in layers["block_0"].items() if name != key}
    write_rows(run_dir / "metrics.jsonl", [metrics_row(1, layers={**layers, "odd": None})])
    text = frame(state_of(run_dir))
    assert "not finite" in text
    assert "block_0" in text


@pytest.mark.parametrize("key", EVENTS[0])
def test_any_key_of_an_event_may_be_missing(run_dir: Path, key: str) -> None:
    write_rows(run_dir / "events.jsonl", [{name: value for name, value in EVENTS[0].items() if name != key}, {}])
    assert "last events" in frame(state_of(run_dir))


@pytest.mark.parametrize(
    "names",
    [("config.json",), ("metrics.jsonl",), ("events.jsonl",), ("config.json", "events.jsonl"),
     ("metrics.jsonl", "events.jsonl")],
)  # fmt: skip
@pytest.mark.parametrize("how", ["missing", "empty"])
def test_any_file_may_be_missing_or_empty(run_dir: Path, names: tuple[str, ...], how: str) -> None:
    for name in names:
        (run_dir / name).unlink()
        if how == "empty":
            (run_dir / name).touch()
    for width in WIDTHS:
        text = frame(state_of(run_dir), width)
        assert ("waiting for the first step" in text) == ("metrics.jsonl" in names)
        assert ("config.json" in words(text).replace(" ", "")) == ("config.json" in names)
        assert ("last events" in text) == ("events.jsonl" not in names)


@pytest.mark.parametrize("name", HARD_STEPS)
def test_hard_steps_as_a_run_without_monitors_writes_them(run_dir: Path, name: str) -> None:
    (run_dir / "metrics.jsonl").write_text(step_metrics(**HARD_STEPS[name]).to_json() + "\n")
    text = words(frame(state_of(run_dir)))
    is_skipped = HARD_STEPS[name].get("skipped", False)
    assert f"skipped {'this step; 1' if is_skipped else 'no; 0'} of the last 1 steps" in text
    assert ("not finite" in text) == (None in state_of(run_dir).newest.values())


def test_what_is_rare_is_found_in_the_steps_before(run_dir: Path) -> None:
    rare = {"layers", "headroom", "slowest_rank", "slowest_rank_share", "eval_loss", "host_memory_gib"}
    newest = {key: value for key, value in metrics_row(NUM_STEPS + 1).items() if key not in rare}
    write_rows(run_dir / "metrics.jsonl", [newest], mode="a")
    text = words(frame(state_of(run_dir)))
    for expected in (
        "step 31 / 360",
        "4.7500 at step 30",
        "headroom 31.2%",
        "slowest rank rank 3",
        "host 7.5 GiB",
        "layers at step 30",
    ):
        assert expected in text


# Whether it goes on


def status_line(state: RunState, age_seconds: float) -> str:
    """The first line of the frame."""
    return words(frame(state, age_seconds=age_seconds).splitlines()[1])


@pytest.mark.parametrize(("step_seconds", "quiet_after"), [(0.5, 10.0), (60.0, 600.0)])
def test_a_run_without_a_step_for_ten_step_times_is_quiet(
    run_dir: Path, step_seconds: float, quiet_after: float
) -> None:
    write_rows(run_dir / "metrics.jsonl", [metrics_row(step, step_seconds=step_seconds) for step in range(1, 10)])
    state = state_of(run_dir)
    assert status_line(state, quiet_after - 1).startswith("running")
    assert status_line(state, quiet_after + 1).startswith("QUIET: newest step ")
    assert duration(step_seconds) in status_line(state, quiet_after + 1)
    assert status_line(state, -100.0) == "running, newest step 0 s ago"  # the writer's clock is ahead


def test_a_finished_run_is_not_quiet(run_dir: Path) -> None:
    write_rows(run_dir / "metrics.jsonl", [metrics_row(360, consumed_samples=7176)])
    state = state_of(run_dir)
    assert status_line(state, 86_400 * 3 + 7200) == "finished, newest step 3 d 2 h ago"
    assert "left 0 s" in frame(state)


@pytest.mark.parametrize(
    ("stop_step", "stopped"), [(NUM_STEPS, True), (NUM_STEPS + 1, True), (NUM_STEPS - 1, False), (None, False)]
)
def test_a_stop_holds_until_a_step_comes_after_it(run_dir: Path, stop_step: int | None, stopped: bool) -> None:
    write_rows(run_dir / "events.jsonl", [{"step": stop_step, "kind": "stop", "text": "ten skips in a row"}], mode="a")
    text = frame(state_of(run_dir))
    assert ("stopped, newest step" in text) == stopped
    assert "ten skips in a row" in text


# The command


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of every file below a folder, and of the folder."""
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in (folder, *folder.rglob("*"))}


@pytest.mark.parametrize("option", [(), ("--once",)])
def test_without_a_terminal_one_frame_is_printed_and_nothing_is_written(
    run_dir: Path, option: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = snapshot(run_dir)
    assert exit_of_main(monkeypatch, "watch", str(run_dir), *option) == 0
    output = capsys.readouterr().out
    assert output.count("my_run") == 1
    assert "\x1b" not in output
    assert snapshot(run_dir) == before


def test_on_a_terminal_frames_follow_the_run_until_ctrl_c(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = iter((101, 102))

    def run_writes_a_step(seconds: float) -> None:
        assert seconds == 0.25
        step = next(steps, None)
        if step is None:
            raise KeyboardInterrupt
        write_rows(run_dir / "metrics.jsonl", [metrics_row(step)], mode="a")

    monkeypatch.setattr("megastable.cli.watch.time.sleep", run_writes_a_step)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    assert exit_of_main(monkeypatch, "watch", str(run_dir), "--refresh", "0.25") == 0
    output = capsys.readouterr().out
    places = [output.index(f"step {step} / 360") for step in (30, 101, 102)]
    assert places == sorted(places)


@pytest.mark.parametrize("arguments", [["no_such_folder"], [os.curdir], [os.curdir, "--refresh", "0"], []])
def test_a_users_mistake_is_exit_code_2(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert exit_of_main(monkeypatch, "watch", *arguments) == 2
    assert capsys.readouterr().out == ""
