"""What this rank does, said by whoever does it and read by the watch for hangs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class Progress:
    """Says how far this rank is.

    Attributes:
        marked_at: when it last came further, by the monotonic clock.
    """

    def __init__(self) -> None:
        self.marked_at = time.monotonic()
        self._marks = 0
        self._step = 0
        self._doing = "start"
        self._long_works = 0

    @property
    def place(self) -> str:
        """Return the step, of which the first is 1, and what is done in it."""
        return f"step {self._step} ({self._doing})" if self._step else f"the start ({self._doing})"

    def begin_step(self, step: int) -> None:
        """Note that this rank begins a step."""
        self._step = step
        self.mark("begin")

    def mark(self, doing: str) -> None:
        """Note that this rank has come so far as to begin ``doing``."""
        self._doing = doing
        self.marked_at = time.monotonic()
        self._marks += 1

    @contextlib.contextmanager
    def at_length(self, doing: str) -> Iterator[None]:
        """Note that this rank works for a time that nobody can bound, and makes progress as long as it lives."""
        self.begin_at_length(doing)
        try:
            yield
        finally:
            self.end_at_length()

    def begin_at_length(self, doing: str) -> None:
        """Begin what ``at_length`` does, where there is no block for it; in any thread."""
        self.mark(doing)
        self._long_works += 1

    def end_at_length(self) -> None:
        """End it."""
        self._long_works -= 1
        self.marked_at = time.monotonic()
        self._marks += 1

    def sign(self) -> object:
        """Return something that is equal to what the last call returned where no progress was made since."""
        return object() if self._long_works else self._marks
