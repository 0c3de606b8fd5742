"""Whether a run goes on, told from its files alone.

A run's state as a picture for the terminal. Reads nothing and knows no clock: what it draws is what it is given.

The live dashboard of ``megastable watch``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megastable.cli.cells import ABSENT, cell, duration, whole
from megastable.cli.curve import Curve
from megastable.cli.layer_table import LayerTable, layers_of
from megastable.cli.run_fields import RECENT_STEPS, STEP_FIELDS, WATCHED_FIELDS, Field, number_format
from megastable.cli.run_files import RunReader, RunState, number

QUIET_STEP_TIMES = 10
"""A run is quiet after as many step times without a new step, which leaves room to evaluate and to save."""
SHORTEST_QUIET_SECONDS = 10.0


@dataclass(frozen=True)
class Status:
    """A sentence on the run, and the style in which it is shown."""

    text: str
    style: str


def status_of(state: RunState, now_unix: float) -> Status:
    """Waiting, finished, stopped, quiet or running, and how old the newest step is."""
    if not state.steps or state.newest_step_unix is None:
        return Status("waiting for the first step", "bold yellow")
    age_seconds = max(0.0, now_unix - state.newest_step_unix)
    newest = f"newest step {duration(age_seconds)} ago"
    step = number(state.newest, "step")
    if state.length is not None and step is not None and step >= state.length.total_steps:
        return Status(f"finished, {newest}", "bold green")
    if _has_stopped(state):
        return Status(f"stopped, {newest}", "bold red")
    step_seconds = state.step_seconds or 0.0
    if age_seconds > max(SHORTEST_QUIET_SECONDS, QUIET_STEP_TIMES * step_seconds):
        return Status(f"QUIET: {newest}; a step usually takes {duration(step_seconds)}", "bold red")
    return Status(f"running, {newest}", "bold green")


def _has_stopped(state: RunState) -> bool:
    """The last event is a stop, and no step came after it; it may name the step before which it happened."""
    last = state.events[-1] if state.events else {}
    step, stop_step = number(state.newest, "step"), number(last, "step")
    return last.get("kind") == "stop" and step is not None and stop_step in (step, step + 1)


SHOWN_EVENTS = 5
PAIRED_COLUMNS, WIDE_COLUMNS = 100, 160
"""Widths from which panels stand in pairs, and from which layers stand beside the rest, given lines enough."""
EVENT_STYLES = {"stop": "bold red", "overflow": "red", "skip": "red", "warning": "yellow", "ramp": "cyan"}


@dataclass(frozen=True)
class Dashboard:
    """One frame, as wide as its place."""

    state: RunState
    now_unix: float
    height: int | None = None
    """Lines of the terminal: the layers get those that the rest leaves. None: as many as there are layers."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The frame, from the run as a whole down to its layers."""
        monitored, height = self.state.newest_with("layers"), self.height
        if not self.state.steps:
            yield from (_header(self.state, self.now_unix), *_events(self.state))
            return

        def lines_of(renderable: RenderableType) -> int:
            return len(console.render_lines(renderable, options, pad=False))

        if options.max_width >= WIDE_COLUMNS and layers_of(monitored):
            two_columns = _beside(self._narrow(), LayerTable(monitored, height))
            if height is None or lines_of(two_columns) <= height:
                yield two_columns
                return
        rest = self._paired() if options.max_width >= PAIRED_COLUMNS else self._narrow()
        yield rest
        yield LayerTable(monitored, None if height is None else height - lines_of(rest))

    def _paired(self) -> Group:
        state = self.state
        panels = _beside(_panel("newest step", state, STEP_FIELDS), _panel("watched", state, WATCHED_FIELDS))
        return Group(_header(state, self.now_unix), panels, _curves(state), *_events(state))

    def _narrow(self) -> Group:
        state = self.state
        return Group(
            _header(state, self.now_unix),
            _panel("newest step", state, STEP_FIELDS),
            _curves(state),
            _panel("watched", state, WATCHED_FIELDS),
            *_events(state),
        )


def _beside(*renderables: RenderableType) -> Table:
    grid = Table.grid(expand=True, padding=(0, 1, 0, 0), pad_edge=False)
    for _ in renderables:
        grid.add_column(ratio=1)
    grid.add_row(*renderables)
    return grid


# The run as a whole


def _header(state: RunState, now_unix: float) -> Panel:
    status = status_of(state, now_unix)
    lines: list[RenderableType] = [Text(status.text, style=status.style)]
    lines += [Text(fault, style="red") for fault in state.faults]
    lines += [Text(line) for line in _description(state)]
    consumed = number(state.newest, "consumed_samples")
    if state.length is not None and consumed is not None:
        lines.append(_beside(ProgressBar(total=state.length.total_samples, completed=consumed)))
    if state.steps:
        lines.append(_progress(state))
    name = state.run_dir.name or state.run_dir.resolve().name
    return Panel(Group(*lines), title=Text(name, style="bold"), title_align="left")


def _description(state: RunState) -> Iterator[str]:
    if state.run is None:
        return
    model, sections, layout = state.run.megastable.model, state.run.megastable, state.layout
    stages, tensor = sections.pipeline.num_stages, sections.tensor_parallel.size
    replicas = layout.data_parallel_size if layout else "?"
    processes = f" = {layout.world_size} processes" if layout else ""
    yield (
        f"model {model.num_layers} layers, hidden {model.hidden_size}, {model.num_attention_heads} heads, "
        f"sequence {model.seq_length}, vocabulary {model.vocab_size}, {number_format(state)}"
    )
    yield f"layout {stages} stages x {replicas} replicas x {tensor} tensor ranks{processes}"


def _progress(state: RunState) -> Text:
    """The newest step and sample; of how many, and how long that takes, where the run file tells."""
    step, samples = cell(state.newest, "step", whole), cell(state.newest, "consumed_samples", whole)
    tokens = cell(state.newest, "consumed_tokens", whole)
    if state.length is None:
        return Text.assemble("step ", step, " | samples ", samples, " | tokens ", tokens)
    consumed, left = number(state.newest, "consumed_samples"), state.seconds_left
    share = "" if consumed is None else f" ({consumed / state.length.total_samples:.1%})"
    return Text.assemble(
        "step ", step, f" / {state.length.total_steps:,} | samples ", samples, f" / {state.length.total_samples:,}",
        f"{share} | tokens ", tokens, " | left ", ABSENT if left is None else duration(left),
    )  # fmt: skip


# Panels, curves and events


def _panel(title: str, state: RunState, fields: tuple[Field, ...]) -> Panel:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    for label, text_of in fields:
        grid.add_row(label, text_of(state))
    return Panel(grid, title=title, title_align="left", border_style="dim")


def _curves(state: RunState) -> RenderableType:
    recent = state.recent(RECENT_STEPS)
    curves = [
        Curve(f"{title}, last {len(recent)} steps", [number(row, key) for row in recent if key in row], style)
        for title, key, style in (("loss", "loss", "green"), ("gradient norm", "grad_norm", "magenta"))
    ]
    return _beside(*curves)


def _events(state: RunState) -> Iterator[RenderableType]:
    if not state.events:
        return
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", justify="right", no_wrap=True)
    grid.add_column(no_wrap=True)
    grid.add_column()
    for event in list(state.events)[-SHOWN_EVENTS:]:
        kind = str(event.get("kind", ABSENT))
        text = " ".join(str(event.get("text", ABSENT)).split())
        grid.add_row(cell(event, "step", whole), Text(kind, style=EVENT_STYLES.get(kind, "")), Text(text))
    yield Panel(grid, title="last events (step, kind, text)", title_align="left", border_style="dim")


def watch_run(run_dir: Path, refresh_seconds: float, once: bool) -> None:
    """Draw the run again every ``refresh_seconds`` until Ctrl-C; a single frame where that is all that is wanted.

    Raises:
        UserError: ``run_dir`` is no run folder.
    """
    reader, console = RunReader(run_dir), Console(highlight=False)
    if once or not sys.stdout.isatty():
        console.print(_frame(reader))
        return
    with suppress(KeyboardInterrupt), Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(_frame(reader, console.height), refresh=True)
            time.sleep(refresh_seconds)


def _frame(reader: RunReader, height: int | None = None) -> Dashboard:
    now_unix = time.time()
    return Dashboard(reader.refresh(now_unix), now_unix, height)
