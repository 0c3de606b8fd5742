"""The table of what every layer did at the newest monitored step, with the outliers marked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from megastable.cli.cells import cell, percent, significant
from megastable.cli.run_files import Row, number

OUTLIER_RATIO = 3.0
MARK = "▲"
LINES_AROUND_ROWS = 5
"""The title, two lines of heads, and what is said below, in up to two."""


@dataclass(frozen=True)
class Column:
    """One value of every layer. Outliers are looked for where layers of all kinds have values of like size."""

    key: str
    head: str
    name: str
    has_outliers: bool = True
    form: Callable[[float], str] = significant


COLUMNS = (
    Column("grad_norm", "gradient\nnorm", "gradient norm"),
    Column("weight_norm", "weight\nnorm", "weight norm", has_outliers=False),
    Column("update_ratio", "update /\nweight", "update/weight ratio"),
    Column("max_activation", "largest\nactivation", "largest activation"),
    Column("max_attention_logit", "attention\nlogit", "largest attention logit"),
    Column("grad_zero_share", "zero\ngrads", "share of zero gradients", has_outliers=False, form=percent),
)


@dataclass(frozen=True)
class Outlier:
    """A value of at least ``OUTLIER_RATIO`` times the median of its column."""

    layer: str
    column: Column
    ratio: float


def layers_of(row: Row) -> dict[str, Row]:
    """The layers of a monitored step, in the order of the model."""
    layers = row.get("layers")
    if not isinstance(layers, dict):
        return {}
    return {name: values for name, values in layers.items() if isinstance(values, dict)}


def outliers(layers: dict[str, Row]) -> list[Outlier]:
    """Values that stand out above the median of all layers, the worst first."""
    found = []
    for column in (column for column in COLUMNS if column.has_outliers):
        values = {name: number(layer, column.key) for name, layer in layers.items()}
        known = {name: value for name, value in values.items() if value is not None}
        middle = median(known.values()) if known else 0.0
        if middle > 0:
            found += [Outlier(name, column, value / middle) for name, value in known.items()]
    return sorted((one for one in found if one.ratio >= OUTLIER_RATIO), key=lambda one: -one.ratio)


@dataclass(frozen=True)
class LayerTable:
    """The layers as a table; where the place is too low for all of them, those that stand out come first."""

    row: Row
    max_lines: int | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The title, the table, and the worst outlier in words."""
        layers, step = layers_of(self.row), number(self.row, "step")
        if not layers:
            return
        found = outliers(layers)
        shown = self._shown(layers, found)
        yield Text("layers" if step is None else f"layers at step {step:,.0f}", style="bold")
        yield _table({name: layers[name] for name in shown}, {(one.layer, one.column.key) for one in found})
        yield Text(_caption(found, len(layers) - len(shown)), style="dim")

    def _shown(self, layers: dict[str, Row], found: list[Outlier]) -> list[str]:
        if self.max_lines is None:
            return list(layers)
        by_interest = dict.fromkeys([*(one.layer for one in found), *layers])
        kept = set(list(by_interest)[: max(1, self.max_lines - LINES_AROUND_ROWS)])
        return [name for name in layers if name in kept]


def _table(layers: dict[str, Row], marked: set[tuple[str, str]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("\nlayer", no_wrap=True)
    for column in COLUMNS:
        table.add_column(column.head, justify="right", no_wrap=True)
    for name, values in layers.items():
        table.add_row(Text(name), *(_cell(values, column, (name, column.key) in marked) for column in COLUMNS))
    return table


def _cell(values: Row, column: Column, is_marked: bool) -> Text:
    text = cell(values, column.key, column.form)
    if is_marked:
        return Text(f"{text.plain} {MARK}", style="bold yellow")
    # As wide as a mark, so that the digits stay below each other.
    return text.append("  ") if column.has_outliers else text


def _caption(found: list[Outlier], hidden: int) -> str:
    more = f"{hidden} more layers do not fit. " if hidden else ""
    if not found:
        return f"{more}No value is {OUTLIER_RATIO:g} times the median of its column."
    worst = found[0]
    return (
        f"{more}{MARK} at least {OUTLIER_RATIO:g} times the median of its column; the worst: "
        f"{worst.column.name} of {worst.layer}, {worst.ratio:.3g} times."
    )
