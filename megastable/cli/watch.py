"""The live dashboard of ``megastable watch``."""

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

from megastable.cli.run_drawings import Curve, LayerTable
from megastable.cli.run_fields import (
    RECENT_STEPS,
    STEP_FIELDS,
    WATCHED_FIELDS,
    Field,
    cell,
    number_format,
    status_of,
)
from megastable.cli.run_files import RunReader, RunState, layers_of, number
from megastable.cli.tables import ABSENT, duration, whole
from megastable.core.errors import shown

SHOWN_EVENTS = 5
PAIRED_COLUMNS = 100
"""Width from which panels stand in pairs."""
WIDE_COLUMNS = 160
"""Width from which the layers stand beside the rest, given lines enough."""
EVENT_STYLES = {"stop": "bold red", "overflow": "red", "skip": "red", "warning": "yellow", "ramp": "cyan"}


def watch_run(run_dir: Path, refresh_seconds: float, once: bool) -> None:
    """Draw the run again every ``refresh_seconds`` until Ctrl-C; one frame with ``once`` or without a terminal.

    Raises:
        UserError: ``run_dir`` is no run folder.
    """
    reader = RunReader(run_dir)
    console = Console(highlight=False, markup=False, emoji=False)
    if once or not sys.stdout.isatty():
        console.print(_frame(reader))
        return
    with suppress(KeyboardInterrupt), Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            # The height is asked every time: a terminal may be resized while it is watched.
            live.update(_frame(reader, console.height), refresh=True)
            time.sleep(refresh_seconds)


def _frame(reader: RunReader, height: int | None = None) -> Dashboard:
    now_unix = time.time()
    return Dashboard(reader.refresh(now_unix), now_unix, height)


@dataclass(frozen=True)
class Dashboard:
    """One frame, as wide as its place. It reads no file and no clock: what it draws is what it is given."""

    state: RunState
    now_unix: float
    height: int | None = None
    """Lines of the terminal: the layers get those that the rest leaves. None: as many as there are layers."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw the frame, from the run as a whole down to its layers."""
        if not self.state.steps:
            yield _header(self.state, self.now_unix)
            yield from _events(self.state)
            return

        monitored = self.state.newest_with("layers")
        if options.max_width >= WIDE_COLUMNS and layers_of(monitored):
            two_columns = _beside(self._narrow(), LayerTable(monitored, self.height))
            # The column beside the layers may be longer than they are, and then its end would be cut.
            if self.height is None or _count_lines(two_columns, console, options) <= self.height:
                yield two_columns
                return
        rest = self._paired() if options.max_width >= PAIRED_COLUMNS else self._narrow()
        lines_left = None
        if self.height is not None:
            lines_left = self.height - _count_lines(rest, console, options)
        yield rest
        yield LayerTable(monitored, lines_left)

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
    """Place things beside each other, each as wide as the others."""
    grid = Table.grid(expand=True, padding=(0, 1, 0, 0), pad_edge=False)
    for _ in renderables:
        grid.add_column(ratio=1)
    grid.add_row(*renderables)
    return grid


def _count_lines(renderable: RenderableType, console: Console, options: ConsoleOptions) -> int:
    return len(console.render_lines(renderable, options, pad=False))


# The run as a whole


def _header(state: RunState, now_unix: float) -> Panel:
    status = status_of(state, now_unix)
    lines: list[RenderableType] = [Text(status.text, style=status.style)]
    lines += [Text(fault, style="red") for fault in state.faults]
    lines += [Text(line) for line in _description(state)]
    consumed = number(state.newest, "consumed_samples")
    if state.length is not None and consumed is not None:
        # In a grid, because a bar of its own would be drawn over the border of the panel.
        lines.append(_beside(ProgressBar(total=state.length.total_samples, completed=consumed)))
    if state.steps:
        lines.append(_progress(state))
    # Of the folder '.', the name is empty.
    name = state.run_dir.name or state.run_dir.resolve().name
    return Panel(Group(*lines), title=Text(shown(name), style="bold"), title_align="left")


def _description(state: RunState) -> Iterator[str]:
    """Describe the model and the layout; nothing where the run file could not be read."""
    if state.run is None:
        return
    model = state.run.megastable.model
    yield (
        f"model {model.num_layers} layers, hidden {model.hidden_size}, {model.num_attention_heads} heads, "
        f"sequence {model.seq_length}, vocabulary {model.vocab_size}, {number_format(state)}"
    )
    stages = state.run.megastable.pipeline.num_stages
    tensor_ranks = state.run.megastable.tensor_parallel.size
    replicas = "?"
    processes = ""
    if state.layout is not None:
        replicas = str(state.layout.data_parallel_size)
        processes = f" = {state.layout.world_size} processes"
    yield f"layout {stages} stages x {replicas} replicas x {tensor_ranks} tensor ranks{processes}"


def _progress(state: RunState) -> Text:
    """Say how far the run is and, where its length is known, of how much, and how long the rest takes."""
    step = cell(state.newest, "step", whole)
    samples = cell(state.newest, "consumed_samples", whole)
    tokens = cell(state.newest, "consumed_tokens", whole)
    if state.length is None:
        return Text.assemble("step ", step, " | samples ", samples, " | tokens ", tokens)
    share = ""
    consumed = number(state.newest, "consumed_samples")
    if consumed is not None:
        share = f" ({consumed / state.length.total_samples:.1%})"
    left = ABSENT
    if state.seconds_left is not None:
        left = duration(state.seconds_left)
    return Text.assemble(
        "step ", step, f" / {state.length.total_steps:,} | samples ", samples, f" / {state.length.total_samples:,}",
        f"{share} | tokens ", tokens, " | left ", left,
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
    """Yield a panel of the last events; nothing before the first."""
    if not state.events:
        return
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", justify="right", no_wrap=True)
    grid.add_column(no_wrap=True)
    grid.add_column()
    for event in list(state.events)[-SHOWN_EVENTS:]:
        kind = str(event.get("kind", ABSENT))
        # A text may have line breaks, such as an overflow's list of layers.
        text = " ".join(str(event.get("text", ABSENT)).split())
        grid.add_row(cell(event, "step", whole), Text(kind, style=EVENT_STYLES.get(kind, "")), Text(text))
    yield Panel(grid, title="last events (step, kind, text)", title_align="left", border_style="dim")
