"""The documents of a packed micro-batch: which of them each token is of, and where in it.

With ``data.packing`` "reset" attention and positions begin anew with every document. A document begins with the
end-of-document token of the one before it, as a text that is generated begins with it, and at the start of a sample. So
its first token is predicted from that token alone, and every token counts, from its own document.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")


class Documents:
    """The documents of one micro-batch, and what is derived from them once for all blocks of a stage.

    Args:
        token_ids: (batch, seq), whole on every tensor rank.
        end_of_document: the token after which another document begins.

    Attributes:
        starts: (batch, seq) int64: where in its sample each token's document begins.
        positions: (batch, seq) int64: the place of each token in its document.
    """

    def __init__(self, token_ids: Tensor, end_of_document: int) -> None:
        place = torch.arange(token_ids.shape[1], device=token_ids.device)
        begins = token_ids == end_of_document
        self.starts = torch.where(begins, place, 0).cummax(dim=-1).values
        self.positions = place - self.starts
        self._derived: dict[Any, Any] = {}

    def once(self, key: Any, derive: Callable[[], Result]) -> Result:
        """Return what ``derive`` returned when it was first called for ``key``: all blocks share it."""
        if key not in self._derived:
            with torch.no_grad():
                self._derived[key] = derive()
        found: Result = self._derived[key]
        return found

    def hide_others(self, bias: Tensor) -> Tensor:
        """Add minus infinity between documents to a bias (heads or 1, seq, seq): (batch, heads or 1, seq, seq)."""
        elsewhere = self.starts[:, None, :, None] != self.starts[:, None, None, :]  # (batch, 1, query, key)
        return bias.unsqueeze(0).masked_fill(elsewhere, -math.inf)


class DocumentScope:
    """Says which documents the layers of this process are reading: those of the micro-batch that is passed forward.

    Attributes:
        current: None where samples are read as one text.
    """

    def __init__(self) -> None:
        self.current: Documents | None = None

    @contextmanager
    def reading(self, documents: Documents) -> Iterator[None]:
        """Let the layers read ``documents`` inside of the context."""
        before = self.current
        self.current = documents
        try:
            yield
        finally:
            self.current = before

    def kept(self, function: Callable[..., Result]) -> Callable[..., Result]:
        """Return ``function`` as it runs now: called again in a backward pass, it reads these documents once more."""
        documents = self.current
        if documents is None:
            return function

        def within(*arguments: Any) -> Result:
            with self.reading(documents):
                return function(*arguments)

        return within
