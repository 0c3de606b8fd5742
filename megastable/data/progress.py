"""Progress of the long parts of preparing a corpus: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from megastable.core.errors import shown

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

Item = TypeVar("Item")
REPORT_SECONDS = 30.0
"""Between two plain lines of a long part."""


def note(line: str, *, show: bool) -> None:
    """Print ``line`` on stderr, at once, so that it stands in a log before the work that it announces."""
    if show:
        print(shown(line), file=sys.stderr, flush=True)


def track(items: Iterable[Item], description: str, total: int, *, show: bool) -> Iterable[Item]:
    """Yield the same items, and show how many of ``total`` were taken."""
    # A bar redraws its line, which fills the log file of a job with every state it ever had.
    if not show or not sys.stderr.isatty():
        note(f"{description} ...", show=show)
        return items
    from rich.console import Console
    from rich.progress import track as rich_track

    return rich_track(items, description, total=total, console=Console(stderr=True))


class Tokenising:
    """Shows how many documents are tokenised, how fast, and how long the rest will take."""

    def __init__(self, total_documents: int, bar: tuple[Progress, TaskID] | None, show: bool) -> None:
        """Begin to count; ``bar`` is drawn where there is a terminal."""
        self._total = total_documents
        self._bar = bar
        self._show = show
        self._started = time.monotonic()
        self._reported = self._started
        self._documents = 0
        self._tokens = 0

    def advance(self, documents: int, tokens: int) -> None:
        """Count what is on disk now."""
        self._documents += documents
        self._tokens += tokens
        if self._bar is not None:
            progress, task = self._bar
            progress.update(task, advance=documents, speed=self._speed())
        elif time.monotonic() - self._reported >= REPORT_SECONDS:
            self._reported = time.monotonic()
            seconds = self._reported - self._started
            left = (self._total - self._documents) * seconds / max(1, self._documents)
            line = f"{self._documents:,} of {self._total:,} documents, {self._speed()}, about {left:,.0f} s left"
            note(line, show=self._show)

    def _speed(self) -> str:
        seconds = max(1e-9, time.monotonic() - self._started)
        return f"{self._documents / seconds:,.0f} documents/s, {self._tokens / seconds:,.0f} tokens/s"


@contextmanager
def tokenising(total_documents: int, description: str, *, show: bool) -> Iterator[Tokenising]:
    """Show the progress of tokenising: a bar on a terminal, a line every now and then elsewhere."""
    if not show or not sys.stderr.isatty():
        note(f"{description} ...", show=show)
        yield Tokenising(total_documents, None, show)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn
    from rich.progress import TimeRemainingColumn as TimeLeft

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]}"),
        TimeLeft(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(description, total=total_documents, speed="")
        yield Tokenising(total_documents, (progress, task), show)
