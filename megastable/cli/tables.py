"""Numbers, times, tables and JSON as a person or a program reads them."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.table import Table

ABSENT = "-"
UNKNOWN = "unknown"
LEAST_WIDTH = 140
"""Columns that the tables of a plan need. For a file or a pipe, rich assumes 80 and would squeeze them."""


def significant(value: float) -> str:
    """Format with four significant digits: 3.142, 12,346, 65,536, 1, 6.00e-05."""
    size = abs(value)
    if size != 0 and not 1e-3 <= size < 1e7:
        return f"{value:.2e}"
    if size >= 1000 or value == round(value):
        return f"{value:,.0f}"
    # '#' keeps the zeros of 12.50, but also the point of '1000.', which 999.97 is rounded to.
    return f"{value:#.4g}".rstrip(".")


def whole(value: float) -> str:
    """Format a count: 1,234."""
    return f"{value:,.0f}"


def percent(value: float) -> str:
    """Format a share of 1: 93.2%, 0%, 0.001%, 2e-36%."""
    if value >= 0.001:
        return f"{value:.1%}"
    return f"{100 * value:.1g}%"


def duration(seconds: float) -> str:
    """Format a time by its two largest units: 3 d 4 h, 5 min 10 s, 0.42 s."""
    if seconds < 10:
        return f"{seconds:.2g} s"
    whole_seconds = round(seconds)
    minutes = whole_seconds // 60
    hours = whole_seconds // 3600
    parts = [(hours // 24, "d"), (hours % 24, "h"), (minutes % 60, "min"), (whole_seconds % 60, "s")]
    first = next(index for index, (amount, _) in enumerate(parts) if amount)
    return " ".join(f"{amount:,} {unit}" for amount, unit in parts[first : first + 2] if amount)


def size(size_bytes: float) -> str:
    """Format a size by its largest unit: 512 B, 1.5 KiB, 12.3 GiB."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    unit = 0
    while size_bytes >= 1024 and unit + 1 < len(units):
        size_bytes /= 1024
        unit += 1
    return f"{size_bytes:,.0f} B" if unit == 0 else f"{size_bytes:,.1f} {units[unit]}"


def as_json(values: Any) -> str:
    """Format plain values for a program to read, in ASCII: any output takes it, and no terminal obeys it."""
    return json.dumps(values, indent=2)


def wide_console(least_width: int = LEAST_WIDTH) -> Console:
    """Make a console that does not squeeze tables where the output is no terminal."""
    # Without markup and emoji codes: a path may hold [red] or :smile:.
    width = max(Console().width, least_width)
    return Console(highlight=False, soft_wrap=True, markup=False, emoji=False, width=width)


def make_table(title: str, *headings: str) -> Table:
    """Make a table without lines, whose columns are never cut."""
    table = Table(title=title, title_justify="left", caption_justify="left", box=None, padding=(0, 3, 0, 0))
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def shown_indices(count: int, most: int) -> list[int]:
    """Choose at most ``most`` of ``count`` entries, evenly spread, with the first and the last."""
    if count <= most:
        return list(range(count))
    # A set, because two neighbours may be rounded to the same entry.
    return sorted({round(index * (count - 1) / (most - 1)) for index in range(most)})
