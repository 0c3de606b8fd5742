"""The progress of commands that move a model, on standard error."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from megastable.core.errors import shown


class ShownProgress:
    """Shows a bar for each piece of work, and lines that stay."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars

    def begin(self, what: str, total: int) -> Callable[[int], None]:
        """Begin a bar; returns what moves it on."""
        task = self._bars.add_task(what, total=total)
        return lambda amount: self._bars.advance(task, amount)

    def note(self, text: str) -> None:
        """Print a line above the bars, and as it is where there are none."""
        self._bars.console.print(shown(text))


@contextmanager
def shown_progress() -> Iterator[ShownProgress]:
    """Show bars as long as the context lasts; where nobody watches, lines alone."""
    # Without markup and emoji codes: a path may hold [red] or :smile:.
    console = Console(stderr=True, highlight=False, soft_wrap=True, markup=False, emoji=False)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as bars:
        yield ShownProgress(bars)
