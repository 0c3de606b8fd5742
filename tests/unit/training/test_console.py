"""What a person sees: plain lines where they are due, a bar on a terminal, whatever the values are."""

import io
import re
import sys
from typing import Any

import pytest

from megastable.core.records import Event
from megastable.training.console import PlainLines, ProgressBar, make_display, summary
from megastable.training.output import report_on_stderr
from tests.unit.training.metrics_examples import HARD_STEPS, step_metrics

hard_steps = pytest.mark.parametrize("changes", HARD_STEPS.values(), ids=HARD_STEPS)


class Terminal(io.StringIO):
    """Stands for a standard output that is a terminal."""

    def isatty(self) -> bool:
        """Say yes."""
        return True


def become_terminal(monkeypatch: pytest.MonkeyPatch, columns: int = 200) -> Terminal:
    """Turn standard output into a terminal. The test itself calls it: pytest puts its own output back before a test."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stdout", stream)
    for name, value in {"TERM": "xterm", "COLUMNS": str(columns), "LINES": "40"}.items():
        monkeypatch.setenv(name, value)
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    return stream


def lines_shown(steps: list[dict[str, Any]], capsys: pytest.CaptureFixture[str], **display: int) -> list[str]:
    """Return the lines that PlainLines prints of ``steps``."""
    plain = PlainLines(**display)
    for changes in steps:
        plain.show(step_metrics(**changes))
    plain.close()
    return capsys.readouterr().out.splitlines()


def test_plain_lines_stand_at_the_first_the_last_and_every_interval(capsys: pytest.CaptureFixture[str]) -> None:
    lines = lines_shown([{"step": step} for step in range(3, 13)], capsys, total_steps=12, interval=5)
    assert [line.split(" | ")[0] for line in lines] == ["step 3/12", "step 5/12", "step 10/12", "step 12/12"]


def test_plain_lines_stand_where_a_step_was_skipped_or_evaluated(capsys: pytest.CaptureFixture[str]) -> None:
    changed: dict[int, dict[str, Any]] = {4: {"skipped": True}, 7: {"eval_loss": 2.25}}
    steps = [{"step": step, **changed.get(step, {})} for step in range(1, 9)]
    lines = lines_shown(steps, capsys, total_steps=100, interval=50)
    assert [line.split(" | ")[0] for line in lines] == ["step 1/100", "step 4/100", "step 7/100"]
    assert "SKIPPED" in lines[1]
    assert "eval loss 2.25" in lines[2]


@hard_steps
def test_plain_lines_take_any_values(changes: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = lines_shown([changes], capsys, total_steps=10, interval=1)
    assert line.endswith(summary(step_metrics(**changes)))


@hard_steps
def test_the_bar_takes_any_values(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = become_terminal(monkeypatch)
    display = make_display(total_steps=20, total_samples=200, consumed_samples=50, interval=5)
    assert isinstance(display, ProgressBar)
    display.show(step_metrics())
    display.show(step_metrics(**changes))
    display.note("saved [red]x[/nothing] [1/2]")
    display.close()
    shown = terminal.getvalue()
    assert f"step {step_metrics(**changes).step} | loss" in shown
    assert "saved [red]x[/nothing] [1/2]" in shown
    assert ("SKIPPED" in shown) == bool(changes.get("skipped"))
    assert ("eval loss" in shown) == ("eval_loss" in changes)
    display.close()  # also after an error that closed it already


def test_the_bar_counts_samples_of_the_whole_run_after_a_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = become_terminal(monkeypatch)
    display = make_display(total_steps=20, total_samples=200, consumed_samples=50, interval=5)
    display.show(step_metrics(consumed_samples=66))
    display.close()
    assert "66/200" in terminal.getvalue()


@pytest.mark.parametrize("columns", [80, 100])
def test_the_bar_shows_what_was_asked_for_on_a_terminal_of_usual_width(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = become_terminal(monkeypatch, columns)
    display = make_display(total_steps=4000, total_samples=64_000, consumed_samples=0, interval=5)
    display.show(step_metrics(step=1000, consumed_samples=16_000, tokens_per_second=12_345.0))
    display.close()
    last_drawn = terminal.getvalue().rsplit("\r", 1)[-1]
    for part in ("loss 2.5", "batch 16", "1.00e-03", "12,345"):
        assert part in last_drawn
    assert re.search(r"[\d-]:[\d-]{2}:[\d-]{2}", last_drawn)  # the time left


def test_elsewhere_than_on_a_terminal_lines_are_plain(capsys: pytest.CaptureFixture[str]) -> None:
    display = make_display(total_steps=20, total_samples=200, consumed_samples=0, interval=5)
    display.show(step_metrics())
    display.note("saved [red]x[/red]")
    display.close()
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert out.splitlines() == [f"step 10/20 | {summary(step_metrics())}", "saved [red]x[/red]"]


def test_the_summary_names_what_a_person_watches() -> None:
    text = summary(step_metrics(loss_scale=65536.0))
    for part in ("loss 2.5000", "grad norm 0.750", "scale 65536", "batch 16", "lr 1.00e-03", "512 tokens/s", "TFLOPs"):
        assert part in text
    assert "SKIPPED" not in text
    assert "eval" not in text
    assert "scale" not in summary(step_metrics(loss_scale=1.0))


RED = "\x1b[31mred"


def test_what_comes_from_outside_is_shown_and_not_obeyed(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paths, keys and reasons of events, through every way on which a run prints them."""
    event = Event(1, 4, "warning", RED, {})
    plain = PlainLines(total_steps=1, interval=1)
    plain.note(RED)
    plain.show_event(event)
    report_on_stderr(RED)
    printed = "".join(capfd.readouterr())
    assert printed.count(r"\x1b[31mred") == 3 and "\x1b" not in printed
    terminal = become_terminal(monkeypatch)
    bar = ProgressBar(total_samples=4, consumed_samples=0)
    bar.note(RED)
    bar.show_event(event)
    bar.close()
    # rich itself moves the cursor and colors the bar, but not red.
    assert r"\x1b[31mred" in terminal.getvalue() and RED not in terminal.getvalue()
