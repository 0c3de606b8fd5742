"""Documents of a prompt and its completion: only the completion is learned, the prompt is read."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from megastable.core.errors import UserError
from megastable.data.indexed_format import IndexedTokens, index_path


@dataclass(frozen=True)
class Prompted:
    """A document of two parts. Each is encoded by itself, so that no token has characters of both."""

    prompt: str
    completion: str


Document = str | Prompted
"""What a source holds. A document without text, or a prompt without completion, has nothing to learn from."""


def text_of(document: Document) -> str:
    """Return all text of a document."""
    return document if isinstance(document, str) else document.prompt + document.completion


def is_empty(document: Document) -> bool:
    """Tell whether there is nothing to learn from."""
    return not (document if isinstance(document, str) else document.completion)


@dataclass(frozen=True)
class PromptSpans:
    """Knows which tokens of a pair are of prompts: every document has two sequences, of which the first is one."""

    pair: IndexedTokens = field(repr=False)

    def __post_init__(self) -> None:
        bounds = self.pair.document_indices
        if len(self.pair.sequence_lengths) != 2 * self.pair.num_documents or (bounds[:] % 2).any():
            raise UserError(
                f"{index_path(self.pair.prefix)} has {len(self.pair.sequence_lengths):,} sequences instead of a prompt "
                f"and a completion for each of {self.pair.num_documents:,} documents"
            )

    def learned(self, start: int, stop: int) -> npt.NDArray[np.bool_]:
        """Return which of the tokens ``[start, stop)`` are to be learned, shape [stop - start]."""
        pointers = self.pair.sequence_pointers
        itemsize = self.pair.tokens.itemsize
        learned = np.ones(stop - start, np.bool_)
        # Of sequences that begin at one place, all but the last are empty. Numpy's own search would copy the file.
        sequence = max(0, bisect_right(pointers, start * itemsize) - 1)
        while sequence < len(pointers) and int(pointers[sequence]) < stop * itemsize:
            if sequence % 2 == 0:
                first = int(pointers[sequence]) // itemsize
                last = first + int(self.pair.sequence_lengths[sequence])
                learned[max(0, first - start) : max(0, last - start)] = False
            sequence += 1
        return learned
