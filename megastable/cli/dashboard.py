"""A run's state as a picture for the terminal. Reads nothing and knows no clock: what it draws is what it is given."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megastable.cli.cells import ABSENT, cell, duration, percent, significant, whole
from megastable.cli.curve import Curve
from megastable.cli.layer_table import LayerTable, layers_of
from megastable.cli.run_files import RunState, number
from megastable.cli.run_status import status_of

RECENT_STEPS = 200
SHOWN_EVENTS = 5
PAIRED_COLUMNS, WIDE_COLUMNS = 100, 160
"""Widths from which panels stand in pairs, and from which the layers stand beside all the rest."""
EVENT_STYLES = {"stop": "bold red", "overflow": "red", "skip": "red", "warning": "yellow", "ramp": "cyan"}
HEADROOM_KEYS = {"max_activation": "activation", "max_attention_logit": "attention logit"}
"""Values of a layer whose share of the number format's maximum is watched."""


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
        if options.max_width >= WIDE_COLUMNS and layers_of(monitored):
            yield _beside(self._narrow(), LayerTable(monitored, height))
            return
        rest = self._paired() if options.max_width >= PAIRED_COLUMNS else self._narrow()
        yield rest
        if height is not None:
            height -= len(console.render_lines(rest, options, pad=False))
        yield LayerTable(monitored, height)

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
        f"sequence {model.seq_length}, vocabulary {model.vocab_size}, {_number_format(state)}"
    )
    yield f"layout {stages} stages x {replicas} replicas x {tensor} tensor ranks{processes}"


def _number_format(state: RunState) -> str:
    if state.run is None:
        return "the number format"
    return "fp16" if state.run.fp16.enabled else "bf16" if state.run.bf16.enabled else "fp32"


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


# Fields: a label, and the text beside it


def _batch(state: RunState) -> Text:
    row, layout = state.newest, state.layout
    replicas = f" x {layout.data_parallel_size} replicas" if layout else ""
    return Text.assemble(
        cell(row, "global_batch_size", whole), " = ", cell(row, "num_microbatches", whole), " micro-batches of ",
        cell(row, "micro_batch_size", whole), replicas,
    )  # fmt: skip


def _loss(state: RunState) -> Text:
    text = cell(state.newest, "loss", "{:.4f}".format)
    if number(state.newest, "loss_volatility") is not None:
        text.append_text(Text.assemble(", volatility ", cell(state.newest, "loss_volatility")))
    return text


def _clipping(state: RunState) -> Text:
    if number(state.newest, "clip_coefficient") == 1.0:
        return Text("1 (not clipped)")
    return cell(state.newest, "clip_coefficient")


def _skips(state: RunState) -> Text:
    recent = state.recent(RECENT_STEPS)
    count = sum(row.get("skipped") is True for row in recent)
    this = Text("this step", style="bold red") if state.newest.get("skipped") is True else Text("no")
    return Text.assemble(this, f"; {count} of the last {len(recent)} steps", style="" if count == 0 else "yellow")


def _speed(state: RunState) -> Text:
    seconds = state.step_seconds
    a_step = "" if seconds is None else f", {duration(seconds)} a step"
    return Text.assemble(cell(state.newest, "tokens_per_second", whole), " tokens/s", a_step)


def _tflops(state: RunState) -> Text:
    hardware = cell(state.newest, "hardware_tflops_per_device")
    return Text.assemble(cell(state.newest, "tflops_per_device"), " a device, ", hardware, " executed")


def _headroom(state: RunState) -> Text:
    row = state.newest_with("headroom")
    text = cell(row, "headroom", percent)
    share = number(row, "headroom")
    if share is None:
        return text
    warned_from = state.run.megastable.monitors.headroom_warning if state.run else 1.0
    if share >= warned_from:
        text.stylize("bold red")
    values = [
        (value, f"{name} {significant(value)} in {layer}")
        for layer, of_layer in layers_of(row).items()
        for key, name in HEADROOM_KEYS.items()
        if (value := number(of_layer, key)) is not None
    ]
    largest = f": {max(values)[1]}" if values else ""
    return text.append(f" of {_number_format(state)}'s maximum{largest}")


def _slowest(state: RunState) -> Text:
    row = state.newest_with("slowest_rank", "slowest_rank_share")
    rank, share = number(row, "slowest_rank"), number(row, "slowest_rank_share")
    if rank is None:
        return cell(row, "slowest_rank")
    name = state.layout.describe(int(rank)) if state.layout else f"rank {rank:.0f}"
    return Text(name if share is None else f"{name}, busy {percent(share)} of the step")


def _memory(state: RunState) -> Text:
    parts = [
        f"{name} {number(state.newest, key):.1f} GiB"
        for name, key in (("host", "host_memory_gib"), ("device", "device_memory_gib"))
        if number(state.newest, key) is not None
    ]
    return Text(", ".join(parts) or ABSENT)


def _validation(state: RunState) -> Text:
    row = state.newest_with("eval_loss")
    text = cell(row, "eval_loss", "{:.4f}".format)
    return text.append_text(Text.assemble(" at step ", cell(row, "step", whole))) if row else text


Field = tuple[str, Callable[[RunState], Text]]

STEP_FIELDS: tuple[Field, ...] = (
    ("loss", _loss),
    ("gradient norm", lambda state: cell(state.newest, "grad_norm").append(" before clipping")),
    ("clip coefficient", _clipping),
    ("learning rate", lambda state: cell(state.newest, "lr")),
    ("loss scale", lambda state: cell(state.newest, "loss_scale")),
    ("skipped", _skips),
    ("batch", _batch),
    ("speed", _speed),
    ("TFLOPs", _tflops),
)
WATCHED_FIELDS: tuple[Field, ...] = (
    ("validation loss", _validation),
    ("headroom", _headroom),
    ("slowest rank", _slowest),
    ("memory", _memory),
)


def _panel(title: str, state: RunState, fields: tuple[Field, ...]) -> Panel:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    for label, text_of in fields:
        grid.add_row(label, text_of(state))
    return Panel(grid, title=title, title_align="left", border_style="dim")


# Curves and events


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
