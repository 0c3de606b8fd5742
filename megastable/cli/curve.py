"""Small curves made of block characters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from megastable.cli.cells import significant

BLOCKS = " ▁▂▃▄▅▆▇█"
NOT_FINITE = "x"
LEVELS = len(BLOCKS) - 1


def bars(values: Sequence[float | None], width: int, height: int) -> list[str]:
    """``height`` lines of at most ``width`` columns, the top line first.

    A column stands for one value or, where there are more values than columns, for the largest of several, so that no
    spike is lost. None is a value that is not finite: its column is a cross.
    """
    columns = _fit(values, width)
    finite = [value for value in columns if value is not None]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    levels = [None if value is None else _level(value, low, high, height) for value in columns]
    return ["".join(_cell(level, row) for level in levels) for row in reversed(range(height))]


def _fit(values: Sequence[float | None], width: int) -> list[float | None]:
    count = min(len(values), width)
    return [_largest(values[i * len(values) // count : (i + 1) * len(values) // count]) for i in range(count)]


def _largest(values: Sequence[float | None]) -> float | None:
    finite = [value for value in values if value is not None]
    return max(finite) if len(finite) == len(values) else None


def _level(value: float, low: float, high: float, height: int) -> int:
    """1 for the lowest value, so that it is seen, up to all the blocks of ``height`` lines."""
    if not 0 < high - low < math.inf:
        return 1
    return 1 + round((value - low) / (high - low) * (height * LEVELS - 1))


def _cell(level: int | None, row: int) -> str:
    if level is None:
        return " " if row else NOT_FINITE
    return BLOCKS[min(max(level - row * LEVELS, 0), LEVELS)]


@dataclass(frozen=True)
class Curve:
    """A curve as wide as its place, with its largest and smallest value at the left."""

    title: str
    values: Sequence[float | None]
    style: str
    height: int = 4

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The title, then the curve."""
        finite = [value for value in self.values if value is not None]
        labels = [significant(max(finite)), significant(min(finite))] if finite else ["", ""]
        label_width = max(map(len, labels))
        lines = bars(self.values, max(1, options.max_width - label_width - 1), self.height)
        sides = [labels[0], *[""] * (self.height - 2), labels[1]]
        yield Text(self.title, style="bold", no_wrap=True, overflow="ellipsis")
        for side, line in zip(sides, lines, strict=True):
            yield Text.assemble((f"{side:>{label_width}} ", "dim"), (line, self.style), no_wrap=True)
