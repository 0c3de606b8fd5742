"""The page of a run in a browser: plots are drawn, a click on an event leads there, nothing goes wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from megastable.cli.report import report
from tests.support.browser import Browser, browser, chromium
from tests.unit.cli.watch_examples import LAYERS, metrics_row, write_config, write_rows

pytestmark = [
    pytest.mark.skipif(chromium() is None, reason="no Chromium"),
    pytest.mark.timeout(240),
]
NUM_STEPS = 400
HOSTILE = "<b></script><img src=x onerror=document.title='hacked'>"
RANGE = "document.getElementById('curves').layout.xaxis.range"


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One browser for all tests."""
    with browser(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs") / "run"
    folder.mkdir()
    write_config(folder)
    layers = {**LAYERS, HOSTILE: {"grad_norm": None}}
    write_rows(folder / "metrics.jsonl", (metrics_row(step, layers=layers) for step in range(1, NUM_STEPS + 1)))
    kinds = ["ramp", "spike", "skip", "rollback", "overflow", HOSTILE]
    events = [{"step": 50 * (i + 1), "kind": kind, "text": HOSTILE, "data": {"x": 1}} for i, kind in enumerate(kinds)]
    write_rows(folder / "events.jsonl", events)
    report(folder)
    empty = folder.parent / "empty"
    empty.mkdir()
    write_config(empty)
    report(empty)
    compared = folder.parent / "compared.html"
    report(folder, compared, compare=folder)
    return {"run": folder / "report.html", "empty": empty / "report.html", "compared": compared}


@pytest.fixture(autouse=True)
def nothing_goes_wrong(opened: Browser, pages: dict[str, Path]) -> Iterator[None]:
    opened.errors.clear()
    opened.requests.clear()
    yield
    assert opened.errors == []
    assert [url for url in opened.requests if not url.startswith(("file:", "data:", "blob:"))] == []


@pytest.mark.parametrize("width", [1280, 375])
@pytest.mark.parametrize("dark", [False, True])
def test_everything_is_drawn_within_the_window(opened: Browser, pages: dict[str, Path], width: int, dark: bool) -> None:
    opened.open(pages["run"], width, dark)
    assert opened.evaluate("document.querySelectorAll('#curves .scatterlayer .trace .js-line').length") >= 9
    assert opened.evaluate("document.querySelectorAll('#heat .heatmaplayer image').length") == 1
    assert opened.evaluate("document.querySelectorAll('#rows tr').length") == 6
    assert opened.evaluate("document.documentElement.scrollWidth <= innerWidth")
    ground = "rgb(20, 23, 26)" if dark else "rgb(255, 255, 255)"
    assert opened.evaluate("getComputedStyle(document.body).backgroundColor") == ground


def test_a_click_on_an_event_moves_both_plots(opened: Browser, pages: dict[str, Path]) -> None:
    opened.open(pages["run"])
    before = opened.evaluate(RANGE)
    opened.click("#rows tr:nth-child(3)")
    opened.wait_for(f"{RANGE}[0] !== {before[0]}")
    low, high = opened.evaluate(RANGE)
    assert low < 150 * 16 < high
    assert high - low < 0.2 * NUM_STEPS * 16
    assert opened.evaluate(RANGE.replace("curves", "heat")) == [low, high]
    assert opened.evaluate("document.querySelector('#rows tr.chosen').dataset.event") == "2"
    opened.click("#whole")
    opened.wait_for(f"{RANGE}[1] > {high}")


def test_the_axis_is_chosen(opened: Browser, pages: dict[str, Path]) -> None:
    opened.open(pages["run"])
    ends = {"samples": NUM_STEPS * 16, "tokens": NUM_STEPS * 2048, "step": NUM_STEPS, "time": NUM_STEPS * 0.5 / 60}
    for axis, end in ends.items():
        opened.evaluate(
            f"(() => {{ const s = document.getElementById('axis'); s.value = '{axis}';"
            "s.dispatchEvent(new Event('change')); })()"
        )
        assert opened.evaluate("document.getElementById('curves').data[0].x.at(-1)") == pytest.approx(end)


def test_no_text_of_the_run_is_obeyed(opened: Browser, pages: dict[str, Path]) -> None:
    opened.open(pages["run"])
    assert opened.evaluate("document.title") == "run"
    assert opened.evaluate("document.querySelectorAll('img, #rows b').length") == 0
    assert opened.evaluate("document.querySelector('#rows td:nth-child(3) span').textContent") == HOSTILE
    # Plotly itself makes some tags of a text bold letters or links.
    assert "<b></script><img" in opened.evaluate("document.getElementById('heat').textContent")


def test_no_button_sends_the_data_away(opened: Browser, pages: dict[str, Path]) -> None:
    opened.open(pages["run"])
    titles = opened.evaluate("[...document.querySelectorAll('.modebar-btn')].map(button => button.dataset.title)")
    assert set(titles) == {
        "Download plot as a PNG", "Zoom", "Pan", "Zoom in", "Zoom out", "Autoscale", "Reset axes",
    }  # fmt: skip


def test_a_run_without_a_step_opens(opened: Browser, pages: dict[str, Path]) -> None:
    opened.open(pages["empty"])
    assert opened.evaluate("document.getElementById('curves').textContent") == "No step yet."


def test_the_compared_run_is_drawn(opened: Browser, pages: dict[str, Path]) -> None:
    opened.open(pages["compared"])
    assert opened.evaluate("document.getElementById('curves').data.filter(t => t.line?.dash === 'dash').length") >= 9
