"""Where a long text can be cut without changing its tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

_SPACE_AFTER_WORD = re.compile(r"(?<=\S)[ \n]")
_MOST_ATTEMPTS = 16
"""Places that are tried for a cut. A tokenizer that adds something to the begin of every text allows none."""


def pieces_between_words(
    text: str, characters: int, is_seam: Callable[[str, int], bool] = lambda text, position: True
) -> Iterator[str]:
    """Cut ``text`` before a space or line feed that follows a word, in pieces of about ``characters`` or a little more.

    A byte-level BPE as GPT-2's looks at words with the space before them, one at a time, so that such a cut changes
    none of its tokens. Where there is no such place, the rest of the text is one piece.

    Args:
        is_seam: for other tokenizers, tells whether a cut of the text at this position leaves the tokens as they are.
    """
    start = 0
    while len(text) - start > characters:
        for attempt, space in enumerate(_SPACE_AFTER_WORD.finditer(text, start + characters)):
            if attempt == _MOST_ATTEMPTS:
                yield text[start:]
                return
            if is_seam(text, space.start()):
                break
        else:
            break
        yield text[start : space.start()]
        start = space.start()
    yield text[start:]
