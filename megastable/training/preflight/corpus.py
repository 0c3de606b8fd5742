"""How much text a run has, told from the sizes of its files without reading them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megastable.config import BytesTokenizerConfig, HfSourceConfig, SourceConfig
from megastable.core.errors import UserError
from megastable.training.preflight.finding import Finding

if TYPE_CHECKING:
    from megastable.training.preflight.review import Review

BYTES_PER_TOKEN = 4
"""Of English text under a trained tokenizer, roughly."""


@dataclass(frozen=True)
class LocalText:
    """Text files of this machine, or the reason why there are none."""

    num_documents: int
    num_bytes: int
    fault: str = ""


def look_at_text(source: SourceConfig) -> LocalText | None:
    """Count the files and bytes of a source of text files; None for other sources, which might need a download."""
    if isinstance(source, HfSourceConfig):
        return None
    from megastable.data.sources import TextFiles, open_source  # loads numpy

    try:
        files = open_source(source)
    except UserError as error:
        return LocalText(0, 0, fault=str(error))
    assert isinstance(files, TextFiles)
    return LocalText(len(files), files.num_bytes())


def text_is_here(review: Review) -> Iterator[Finding]:
    """A path that is wrong is found out now. It may still be right on another machine."""
    if review.text is not None and review.text.fault:
        yield Finding(
            "warning",
            "megastable.data.source.path",
            review.text.fault.removeprefix("megastable.data.source.path: "),
            "mend the path, unless it is meant for another machine",
        )


def text_holds_a_batch(review: Review) -> Iterator[Finding]:
    """An epoch has at least as many samples as one step takes."""
    text, data = review.text, review.run.megastable.data
    if text is None or text.fault:
        return
    largest = review.plan.phases[-1].batch.global_batch_size
    training_share = 1 - data.validation_fraction
    # A byte-level tokenizer makes at most a token of every byte, and one more at the end of a document.
    most_tokens = training_share * (text.num_bytes + text.num_documents)
    in_bytes = isinstance(data.tokenizer, BytesTokenizerConfig)
    likely_tokens = most_tokens if in_bytes else training_share * (text.num_bytes / BYTES_PER_TOKEN)
    needed = largest * review.model.seq_length
    if likely_tokens >= needed:
        return
    certain = most_tokens < needed
    amount = f"at most {most_tokens:,.0f}" if certain else f"an estimated {likely_tokens:,.0f}"
    why = "" if certain or in_bytes else f" (from {text.num_bytes:,} bytes, {BYTES_PER_TOKEN} a token)"
    fitting = math.floor(likely_tokens / review.model.seq_length)
    yield Finding(
        "error" if certain else "warning",
        "megastable.data.source",
        f"{amount} training tokens{why} are less than one step of {largest:,} x {review.model.seq_length:,} = "
        f"{needed:,}: a batch would hold the same samples twice",
        f"more text, or a largest global batch of at most {fitting:,}" if fitting else "more text, or a shorter sample",
    )
