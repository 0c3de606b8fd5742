"""Continues a text token by token, in one process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megastable.core.errors import UserError
from megastable.interop.one_process import load_model
from megastable.interop.saved_model import SavedModel

UNFINISHED = "\ufffd"
"""What the bytes of half a character are decoded to."""
MOST_HELD_BACK = 64
"""Tokens, of which a character has 4 at most: what waits longer is no character, but bytes that are no text."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn.

    Attributes:
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: draw among so many of the likeliest; 0 for all.
        top_p: draw among the likeliest that together have this probability (Holtzman et al., arXiv 1904.09751).
    """

    temperature: float
    top_k: int
    top_p: float

    def draw(self, logits: Tensor, generator: torch.Generator) -> int:
        """Draw a token id from logits (vocabulary,)."""
        if self.temperature == 0:
            return int(logits.argmax())
        # In fp64, and from the largest: a small temperature makes of fp32 logits what no exponential holds.
        scaled = (logits.double() - logits.max()) / self.temperature
        ranked, ids = scaled.softmax(-1).sort(descending=True)
        before = ranked.cumsum(-1) - ranked  # of the likelier ones, so that the first always stays
        kept = before < self.top_p
        if self.top_k > 0:
            kept[self.top_k :] = False
        choice = torch.multinomial(ranked * kept, 1, generator=generator)
        return int(ids[choice])


def generate(
    saved: SavedModel, tokenizer: Any, prompt: str, max_tokens: int, sampling: Sampling, seed: int
) -> Iterator[str]:
    """Yield the continuation in pieces of whole characters; it ends with the document or after ``max_tokens``.

    The model sees the last ``megastable.model.seq_length`` tokens at a time. An empty prompt begins a document.

    Raises:
        UserError: the prompt cannot be encoded.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    end = tokenizer.eos_token_id
    before: list[int] = tokenizer.encode(prompt, add_special_tokens=False)
    ids = list(before) or ([] if end is None else [end])
    if not ids:
        raise UserError("the prompt is empty, and the tokenizer has no token that begins a document; give a prompt")
    model = load_model(saved).to(device)
    # What follows in a padded vocabulary, the tokenizer has no text for.
    num_tokens = 1 + max(tokenizer.get_vocab().values())
    generator = torch.Generator().manual_seed(seed)
    text = WholeCharacters(tokenizer, before)
    for _ in range(max_tokens):
        window = torch.tensor([ids[-saved.model.seq_length :]], device=device)  # (1, tokens)
        with torch.no_grad():
            logits = model(window)[0, -1, :num_tokens].cpu()
        token = sampling.draw(logits, generator)
        if token == end:
            break
        ids.append(token)
        yield text.add(token)
    yield text.rest()


class WholeCharacters:
    """Decodes tokens as they come, and holds back the bytes of a character that is not whole yet.

    They are decoded together with those before them, because many tokenizers leave out the space before the first
    token that they are given. Only with the last ones: a long text would otherwise be decoded once for each token.
    """

    def __init__(self, tokenizer: Any, before: Sequence[int] = ()) -> None:
        """Begin after the tokens ``before``, whose text is not shown."""
        self._tokenizer = tokenizer
        self._tail = list(before)
        self._num_shown_tokens = len(self._tail)
        self._num_shown = len(self._decoded())

    def add(self, token: int) -> str:
        """Add a token, and return the text that is whole with it; it may be empty."""
        self._tail.append(token)
        text = self._decoded()
        whole = text.rstrip(UNFINISHED)
        if len(self._tail) - self._num_shown_tokens > MOST_HELD_BACK:
            whole = text
        piece = self._new_text(whole)
        # A token without text stays with those before it: alone it could not keep the space of the next one.
        if piece and whole == text:
            self._forget_shown()
        return piece

    def rest(self) -> str:
        """Return what was held back, with a mark for what is no character."""
        return self._new_text(self._decoded())

    def _decoded(self) -> str:
        text: str = self._tokenizer.decode(self._tail, clean_up_tokenization_spaces=False)
        return text

    def _new_text(self, text: str) -> str:
        new = text[self._num_shown :]
        self._num_shown = max(self._num_shown, len(text))
        return new

    def _forget_shown(self) -> None:
        """Keep the tokens of the last piece alone."""
        del self._tail[: self._num_shown_tokens]
        self._num_shown_tokens = len(self._tail)
        self._num_shown = len(self._decoded())
