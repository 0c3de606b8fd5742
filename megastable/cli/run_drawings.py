"""What the dashboard draws of a run: curves made of block characters, and the table of its layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from megastable.cli.run_fields import cell
from megastable.cli.run_files import Row, layers_of, number
from megastable.cli.tables import percent, significant

BLOCKS = " ▁▂▃▄▅▆▇█"
LEVELS = len(BLOCKS) - 1
"""Heights of a value within one line."""
CROSS = "x"
OUTLIER_RATIO = 3.0
MARK = "▲"
LINES_AROUND_ROWS = 5
"""The title, two lines of heads, and the caption, in up to two."""


# Curves


def bars(values: Sequence[float | None], width: int, height: int) -> list[str]:
    """Draw ``height`` lines of at most ``width`` columns, the top line first.

    A column stands for one value or, where there are more values than columns, for the largest of several, so that no
    spike is lost. None is a value that is not finite: its column is a cross.
    """
    columns = _fit(values, width)
    finite = [value for value in columns if value is not None]
    low = min(finite, default=0.0)
    high = max(finite, default=0.0)
    levels = [_level(value, low, high, height) for value in columns]
    return ["".join(_block(level, line) for level in levels) for line in reversed(range(height))]


def _fit(values: Sequence[float | None], width: int) -> list[float | None]:
    """Reduce the values to at most ``width``, each the largest of a group of neighbours."""
    if not values:
        return []
    count = min(len(values), width)
    # Integers, so that no value falls between two groups.
    bounds = [index * len(values) // count for index in range(count + 1)]
    return [_largest(values[start:stop]) for start, stop in pairwise(bounds)]


def _largest(values: Sequence[float | None]) -> float | None:
    """Return the largest value; None where one of them is not finite, which is worse than any spike."""
    finite = [value for value in values if value is not None]
    return max(finite) if len(finite) == len(values) else None


def _level(value: float | None, low: float, high: float, height: int) -> int | None:
    """Scale a value to 1 for the lowest, so that it is seen, up to all the blocks of ``height`` lines."""
    if value is None:
        return None
    if not 0 < high - low < math.inf:  # a flat curve, or values so far apart that their difference overflows
        return 1
    return 1 + round((value - low) / (high - low) * (height * LEVELS - 1))


def _block(level: int | None, line: int) -> str:
    """Return the character of a column in a line, counted from the lowest."""
    if level is None:
        return CROSS if line == 0 else " "
    return BLOCKS[min(max(level - line * LEVELS, 0), LEVELS)]


@dataclass(frozen=True)
class Curve:
    """A curve as wide as its place, with its largest and smallest value at the left."""

    title: str
    values: Sequence[float | None]
    style: str
    height: int = 4

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw the title, then the curve."""
        highest = lowest = ""
        finite = [value for value in self.values if value is not None]
        if finite:
            highest = significant(max(finite))
            lowest = significant(min(finite))
        label_width = max(len(highest), len(lowest))
        lines = bars(self.values, max(1, options.max_width - label_width - 1), self.height)
        labels = [highest, *[""] * (self.height - 2), lowest]
        yield Text(self.title, style="bold", no_wrap=True, overflow="ellipsis")
        for label, line in zip(labels, lines, strict=True):
            yield Text.assemble((f"{label:>{label_width}} ", "dim"), (line, self.style), no_wrap=True)


# Layers


@dataclass(frozen=True)
class Column:
    """One value of every layer. Outliers are marked where layers of all kinds have values of like size."""

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


def outliers(layers: dict[str, Row]) -> list[Outlier]:
    """Find the values that stand out above the median of all layers, the largest ratio first."""
    found = []
    for column in COLUMNS:
        if not column.has_outliers:
            continue
        known = {}
        for name, layer in layers.items():
            value = number(layer, column.key)
            if value is not None:
                known[name] = value
        if not known:
            continue
        # The median, which an outlier does not move; a mean would hide it in a shallow model.
        middle = median(known.values())
        if middle <= 0:  # a ratio to zero says nothing
            continue
        for name, value in known.items():
            if value / middle >= OUTLIER_RATIO:
                found.append(Outlier(name, column, value / middle))
    return sorted(found, key=lambda outlier: -outlier.ratio)


@dataclass(frozen=True)
class LayerTable:
    """The layers as a table; where the place is too low for all of them, those that stand out come first."""

    row: Row
    max_lines: int | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw the title, the table, and the largest outlier in words."""
        layers = layers_of(self.row)
        if not layers:
            return
        step = number(self.row, "step")
        title = "layers" if step is None else f"layers at step {step:,.0f}"
        found = outliers(layers)
        shown = self._shown(layers, found)
        yield Text(title, style="bold")
        yield _table({name: layers[name] for name in shown}, {(one.layer, one.column.key) for one in found})
        yield Text(_caption(found, len(layers) - len(shown)), style="dim")

    def _shown(self, layers: dict[str, Row], found: list[Outlier]) -> list[str]:
        """Choose the layers that have a place, in the order of the model."""
        if self.max_lines is None:
            return list(layers)
        # A dict, because it keeps the order and every name once: the outliers, largest first, then all others.
        by_interest = dict.fromkeys([*(one.layer for one in found), *layers])
        # At least one row, however low the terminal is.
        kept = set(list(by_interest)[: max(1, self.max_lines - LINES_AROUND_ROWS)])
        return [name for name in layers if name in kept]


def _table(layers: dict[str, Row], marked: set[tuple[str, str]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("\nlayer", no_wrap=True)  # in the second line of the heads, beside their last words
    for column in COLUMNS:
        table.add_column(column.head, justify="right", no_wrap=True)
    for name, values in layers.items():
        table.add_row(Text(name), *(_layer_cell(values, column, (name, column.key) in marked) for column in COLUMNS))
    return table


def _layer_cell(values: Row, column: Column, is_marked: bool) -> Text:
    text = cell(values, column.key, column.form)
    if is_marked:
        return Text(f"{text.plain} {MARK}", style="bold yellow")
    if column.has_outliers:
        text.append("  ")  # as wide as a mark, so that the digits stay below each other
    return text


def _caption(found: list[Outlier], hidden: int) -> str:
    more = ""
    if hidden > 0:
        more = f"{hidden} more layers do not fit. "
    if not found:
        return f"{more}No value is {OUTLIER_RATIO:g} times the median of its column."
    worst = found[0]
    return (
        f"{more}{MARK} at least {OUTLIER_RATIO:g} times the median of its column; the worst: "
        f"{worst.column.name} of {worst.layer}, {worst.ratio:.3g} times."
    )
