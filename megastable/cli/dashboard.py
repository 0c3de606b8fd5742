"""A run's state as a picture for the terminal. Reads nothing and knows no clock: what it draws is what it is given."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megastable.cli.cells import ABSENT, cell, duration, whole
from megastable.cli.curve import Curve
from megastable.cli.layer_table import LayerTable, layers_of
from megastable.cli.run_fields import RECENT_STEPS, STEP_FIELDS, WATCHED_FIELDS, Field, number_format
from megastable.cli.run_files import RunState, number
from megastable.cli.run_status import status_of

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
