"""Numbers and times as a person reads them."""

from __future__ import annotations

from collections.abc import Callable

from rich.text import Text

from megastable.cli.run_files import Row, number

ABSENT = "-"
NOT_FINITE = Text("not finite", style="bold red")


def significant(value: float) -> str:
    """Four significant digits: 3.142, 12,346, 65,536, 1, 6.00e-05."""
    size = abs(value)
    if size != 0 and not 1e-3 <= size < 1e7:
        return f"{value:.2e}"
    return f"{value:,.0f}" if size >= 1000 or value == round(value) else f"{value:#.4g}".rstrip(".")


def whole(value: float) -> str:
    """A count: 1,234."""
    return f"{value:,.0f}"


def percent(value: float) -> str:
    """A share of 1: 93.2%, 0%, 0.001%, 2e-36%."""
    return f"{value:.1%}" if value >= 0.001 else f"{100 * value:.1g}%"


def duration(seconds: float) -> str:
    """The two largest units: 3 d 4 h, 5 min 10 s, 0.42 s."""
    if seconds < 10:
        return f"{seconds:.2g} s"
    whole_seconds = round(seconds)
    hours, minutes = whole_seconds // 3600, whole_seconds // 60
    parts = [(hours // 24, "d"), (hours % 24, "h"), (minutes % 60, "min"), (whole_seconds % 60, "s")]
    first = next(index for index, (amount, _) in enumerate(parts) if amount)
    return " ".join(f"{amount:,} {unit}" for amount, unit in parts[first : first + 2] if amount)


def cell(row: Row, key: str, form: Callable[[float], str] = significant) -> Text:
    """The value of a key; a dash where it is absent, and words where it is not finite."""
    if key not in row:
        return Text(ABSENT, style="dim")
    value = number(row, key)
    return NOT_FINITE.copy() if value is None else Text(form(value))
