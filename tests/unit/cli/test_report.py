"""``megastable report``: the page of a run, whatever its files hold."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from megastable.cli import report_data as module
from megastable.cli.main import app
from megastable.cli.report import FIRST_LINE, as_script_data, page, report
from megastable.cli.report_data import MOST_COLUMNS, MOST_EVENTS, MOST_POINTS, report_data
from megastable.cli.report_forecast import planned
from megastable.cli.run_files import RunReader, RunState
from megastable.core.errors import UserError
from tests.unit.cli.watch_examples import EVENTS, LAYERS, NOW_UNIX, metrics_row, write_config, write_rows

HOSTILE = "</script><script>alert(1)</script><!--<img src=x onerror=alert(2)>&amp; %DATA% %JS% \u2028\u202e\x1b[31m"


class Page(HTMLParser):
    """What stands in a page: the tags, and the text of the element with the data."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.data = ""
        self._in_data = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note the tag."""
        self.tags.append(tag)
        self._in_data = dict(attrs).get("id") == "data"

    def handle_data(self, data: str) -> None:
        """Keep what the element of the data holds."""
        if self._in_data:
            self.data += data


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    write_config(folder)
    write_rows(folder / "metrics.jsonl", (metrics_row(step) for step in range(1, 8)))
    write_rows(folder / "events.jsonl", EVENTS)
    return folder


def read(folder: Path) -> RunState:
    return RunReader(folder, whole=True).refresh(NOW_UNIX)


def data_of(folder: Path, compared: Path | None = None) -> dict[str, Any]:
    return report_data(read(folder), "running", "{}", None if compared is None else read(compared))


def written(folder: Path) -> dict[str, Any]:
    """The data of the page that the command writes."""
    report(folder)
    data: dict[str, Any] = json.loads(Page((folder / "report.html").read_text(encoding="utf-8")).data)
    return data


# What is shown


def test_every_curve_stands_over_every_axis(run_dir: Path) -> None:
    lines = data_of(run_dir)["runs"][0]["lines"]
    assert set(lines) == {line.key for panel in module.PANELS for line in panel.lines}
    assert lines["loss"]["x"] == {
        "samples": [step * 16 for step in range(1, 8)],
        "tokens": [step * 2048 for step in range(1, 8)],
        "step": list(range(1, 8)),
        "time": [pytest.approx(step * 0.5 / 60) for step in range(1, 8)],
    }
    assert lines["loss"]["y"] == [pytest.approx(5 - step / 100) for step in range(1, 8)]


def test_layers_have_norm_ratio_and_share_of_the_maximum(run_dir: Path) -> None:
    heat_map = data_of(run_dir)["heat_map"]
    assert heat_map["layers"] == list(LAYERS)
    cells = {each["title"]: each["cells"] for each in heat_map["maps"]}
    assert cells["gradient norm"][2] == [0.96] * 7
    assert cells["update / weight"][2] == [1.75e-4] * 7
    # The largest of activation and attention logit, over the maximum of fp32.
    assert cells["headroom used"][2] == [pytest.approx(14.75 / 3.4028234663852886e38, rel=1e-3)] * 7


def test_an_event_stands_where_its_step_does(run_dir: Path) -> None:
    events = data_of(run_dir)["events"]
    assert [event["kind"] for event in events] == ["ramp", "overflow"]
    assert events[1]["x"]["samples"] == 32
    assert events[1]["text"] == "infinite in [block_1]\non rank 1"


def test_the_plan_stands_beside_what_was_measured(run_dir: Path) -> None:
    plan = written(run_dir)["plan"]
    rows = {name: (planned, measured) for name, planned, measured in plan["rows"]}
    assert rows["steps"] == ("360", "7")
    assert rows["memory of the fullest device, GiB"][1] == "70.50"
    # At the ends of the steps, as the curves of the run.
    assert plan["lines"]["lr"]["x"]["step"][:1] == [1]


def test_the_compared_run_stands_beside(run_dir: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    write_rows(other / "metrics.jsonl", [metrics_row(1, loss=9.0)])
    data = data_of(run_dir, other)
    assert [run["name"] for run in data["runs"]] == ["run", "other"]
    assert data["runs"][1]["lines"]["loss"]["y"] == [9.0]


def test_a_long_run_is_thinned_and_the_page_says_so(run_dir: Path) -> None:
    count = 4 * MOST_POINTS
    spike, not_finite = 5000, 7001
    rows = [metrics_row(step, layers={"head": {"grad_norm": float(step % 10)}}) for step in range(1, count + 1)]
    rows[spike]["loss"] = 99.0
    rows[not_finite]["loss"] = None
    rows[not_finite]["layers"] = {"head": {"grad_norm": None}}
    write_rows(run_dir / "metrics.jsonl", rows)
    write_rows(run_dir / "events.jsonl", (EVENTS[0] | {"step": step} for step in range(MOST_EVENTS + 5)))
    data = data_of(run_dir)
    loss = data["runs"][0]["lines"]["loss"]
    assert len(loss["y"]) <= MOST_POINTS
    assert dict(zip(loss["x"]["step"], loss["y"], strict=True))[spike + 1] == 99.0
    assert None in loss["y"]
    cells = data["heat_map"]["maps"][0]["cells"][0]
    assert len(cells) == MOST_COLUMNS
    assert sorted(set(map(str, cells))) == ["9.0", "not finite"]
    assert [event["step"] for event in data["events"]][-1] == MOST_EVENTS + 4
    assert len(data["events"]) == MOST_EVENTS
    assert [word in " ".join(data["notes"]) for word in ("12,000 steps", "300 columns", "newest 2,000")] == [True] * 3


# Odd files


def test_what_a_resume_took_again_counts_once(run_dir: Path) -> None:
    write_rows(run_dir / "metrics.jsonl", [metrics_row(5, loss=1.0), metrics_row(6, loss=2.0)], mode="a")
    assert data_of(run_dir)["runs"][0]["lines"]["loss"]["x"]["step"] == [1, 2, 3, 4, 5, 6]


def test_half_a_line_at_the_end_waits(run_dir: Path) -> None:
    with open(run_dir / "metrics.jsonl", "a") as file:
        file.write('{"step": 8, "los')
    assert len(written(run_dir)["runs"][0]["lines"]["loss"]["y"]) == 7


def test_a_run_that_has_not_begun_shows_its_file_and_plan(run_dir: Path) -> None:
    for name in ("metrics", "events"):
        (run_dir / f"{name}.jsonl").unlink()
    data = written(run_dir)
    assert data["runs"][0]["lines"] == {}
    assert "waiting for the first step" in data["status"]
    assert '"megastable"' in data["config"]
    assert data["plan"]["rows"]


def test_a_run_file_that_cannot_be_read_leaves_the_curves(run_dir: Path) -> None:
    (run_dir / "config.json").write_text("{ half")
    data = written(run_dir)
    assert len(data["runs"][0]["lines"]["loss"]["y"]) == 7
    assert data["config"] == "{ half"
    assert any("config.json" in note for note in data["notes"])
    assert "left out" in data["plan"]["note"]


rows = st.dictionaries(
    st.sampled_from(
        [
            "step",
            "consumed_samples",
            "loss",
            "layers",
            "kind",
            "text",
            "data",
            "step_seconds",
            "global_batch_size",
            "micro_batch_size",
            "num_microbatches",
            "device_memory_gib",
        ]
    ),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=4,
    ),
)


@settings(max_examples=100, deadline=None)
@given(steps=st.lists(rows, max_size=5), events=st.lists(rows, max_size=3))
def test_whatever_the_lines_hold_there_is_a_page(
    tmp_path_factory: pytest.TempPathFactory, steps: list[Any], events: list[Any]
) -> None:
    folder = tmp_path_factory.mktemp("run")
    write_config(folder)
    write_rows(folder / "metrics.jsonl", steps)
    write_rows(folder / "events.jsonl", events)
    state = read(folder)
    data = report_data(state, "", "", None)
    data["plan"] = planned(state)
    assert json.loads(Page(page(data, "")).data) == json.loads(json.dumps(data))


def test_a_folder_whose_name_is_no_text_is_shown(run_dir: Path) -> None:
    odd = run_dir.rename(run_dir.with_name(os.fsdecode(b"run\xff")))
    assert written(odd)["runs"][0]["name"] == "run\\udcff"


@pytest.mark.parametrize("content", [None, "", "no JSON\n"])
def test_nothing_to_show_is_one_message(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(UserError, match=r"no run folder|nothing to show"):
        report(tmp_path)
    assert not (tmp_path / "report.html").exists()


# Text from outside


def test_no_text_of_a_run_becomes_a_part_of_the_page(run_dir: Path, tmp_path: Path) -> None:
    plain = Page((written(run_dir), (run_dir / "report.html").read_text(encoding="utf-8"))[1]).tags
    hostile = {"step": 1, "kind": HOSTILE, "text": HOSTILE, "data": {HOSTILE: HOSTILE}}
    write_rows(run_dir / "events.jsonl", [hostile])
    write_rows(run_dir / "metrics.jsonl", [metrics_row(1, layers={HOSTILE: LAYERS["head"]})])
    (run_dir / "config.json").write_text(HOSTILE, encoding="utf-8")
    odd = run_dir.rename(tmp_path / "<script>alert(3)<!-- %DATA%")
    data = written(odd)
    text = (odd / "report.html").read_text(encoding="utf-8")
    assert Page(text).tags == plain
    assert "alert(1)<" not in text
    # Only what turns text round or commands a terminal is shown as an escape.
    assert data["events"][0]["text"].startswith("</script><script>alert(1)</script><!--")
    assert "\u202e" not in data["config"]


@given(st.text())
def test_data_neither_ends_its_element_nor_changes(text: str) -> None:
    inside = as_script_data({"text": text})
    assert not re.search("[<>&]", inside)
    assert inside.isascii()
    assert json.loads(inside) == {"text": text}


# The file


def test_the_page_needs_no_network(run_dir: Path) -> None:
    report(run_dir)
    text = (run_dir / "report.html").read_text(encoding="utf-8")
    assert "default-src 'none'" in text
    assert not re.search(r"<(script|link|img)[^>]*(src|href)=[\"']?http", text)


def test_an_older_page_is_replaced(run_dir: Path) -> None:
    report(run_dir)
    write_rows(run_dir / "metrics.jsonl", [metrics_row(8)], mode="a")
    assert len(written(run_dir)["runs"][0]["lines"]["loss"]["y"]) == 8
    assert sorted(path.name for path in run_dir.iterdir()) == [
        "config.json", "events.jsonl", "metrics.jsonl", "report.html",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.json", "report.html"])
def test_no_other_file_is_replaced(run_dir: Path, name: str) -> None:
    target = run_dir / name
    if not target.exists():
        target.write_text("<!doctype html><p>mine")
    before = target.read_bytes()
    result = CliRunner().invoke(app, ["report", str(run_dir), "-o", str(target)])
    assert isinstance(result.exception, UserError)
    assert "was not written by megastable report" in str(result.exception)
    assert target.read_bytes() == before


@pytest.mark.parametrize("output", [".", "missing/report.html"])
def test_a_place_that_cannot_be_written_is_one_message(run_dir: Path, output: str) -> None:
    with pytest.raises(UserError, match=r"no file|no folder"):
        report(run_dir, run_dir / output)


def test_what_could_not_be_put_in_its_place_leaves_nothing(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    before = sorted(run_dir.iterdir())
    with pytest.raises(OSError, match="No space left"):
        report(run_dir)
    assert sorted(run_dir.iterdir()) == before


def test_plotly_missing_is_one_message_that_says_what_to_install(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(UserError, match=r"pip install 'megastable\[plot\]'"):
        report(run_dir)


def test_the_page_is_for_whoever_may_read_new_files(run_dir: Path) -> None:
    report(run_dir)
    usual = run_dir / "usual"
    usual.touch()
    assert stat.S_IMODE((run_dir / "report.html").stat().st_mode) == stat.S_IMODE(usual.stat().st_mode)
    assert (run_dir / "report.html").read_text(encoding="utf-8").startswith(FIRST_LINE)
