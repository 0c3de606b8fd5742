"""How long work tells whoever waits for it how far it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Progress(Protocol):
    """Shows the progress of one piece of work after another."""

    def begin(self, what: str, total: int) -> Callable[[int], None]:
        """Begin a piece of work, and return what is told of each part that is done; ``total`` is the sum of all."""
        ...

    def note(self, text: str) -> None:
        """Show a line that stays."""
        ...
