"""Progress of the long parts of preparing a corpus: a bar on a terminal, one plain line elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TypeVar

from megastable.core.errors import shown

Item = TypeVar("Item")


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
