"""Rules of the model's shape and first weights: std against width and depth, head dimension, vocabulary.

How much text a run has, told from the sizes of its files without reading them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from megastable.config import BytesTokenizerConfig
from megastable.core.init_std import INIT_SCHEMES, MatrixSize, megatron_530b, residual_output_std
from megastable.planning.preflight.review import Finding, Review

STD_RATIOS = (0.25, 2.0)
"""Of a std to sqrt(1 / (3 hidden)). GPT-2's 0.02 is 1.0 at its width 768, and 3.7 at 11,600."""
DEEP_FROM_LAYERS = 24
HEAD_DIMS = (64, 128)
TENSOR_CORE_MULTIPLE = 8
VOCABULARY_MULTIPLE = 128


def std_fits_the_width(review: Review) -> Iterator[Finding]:
    """The std of fresh weights falls with the root of the width. An untied embedding is free: a norm follows it."""
    init, hidden = review.run.megastable.init, review.model.hidden_size
    stds = {"std": INIT_SCHEMES[init.scheme](MatrixSize.square(hidden), init.std), "head_std": init.head_std}
    if review.model.tie_embeddings:  # it makes the logits, too
        stds["embedding_std"] = init.embedding_std
    reference = megatron_530b(MatrixSize.square(hidden), None)
    low, high = STD_RATIOS
    for key, std in stds.items():
        if std is not None and not low <= std / reference <= high:
            effect = "activations and logits start too large" if std > reference else "the signal starts too faint"
            yield Finding(
                "warning",
                f"megastable.init.{key}",
                f"{std:g} at width {hidden} is {std / reference:.2g} times sqrt(1/(3 x {hidden})) = {reference:.3g}: "
                f"{effect}",
                '"scheme": "megatron_530b", without std' if key == "std" else f'"{key}": {reference:.2g}, or null',
            )


def std_fits_the_depth(review: Review) -> Iterator[Finding]:
    """Every block adds to the residual stream twice, so deep models scale those projections down."""
    init, model = review.run.megastable.init, review.model
    if not init.residual_scaling and model.num_layers >= DEEP_FROM_LAYERS:
        std = INIT_SCHEMES[init.scheme](MatrixSize.square(model.hidden_size), init.std)
        scaled = residual_output_std(std, model.num_layers)
        yield Finding(
            "warning",
            "megastable.init.residual_scaling",
            f"false: {model.num_layers} blocks write into the residual stream {2 * model.num_layers} times with std "
            f"{std:.3g}, {std / scaled:.1f} times the {scaled:.2g} that keeps its variance",
            '"residual_scaling": true',
        )


def head_dim_suits_the_kernels(review: Review) -> Iterator[Finding]:
    """Fused attention wants a multiple of 8; 64 to 128 is what models of customary size have."""
    model, (low, high) = review.model, HEAD_DIMS
    aligned = model.head_dim % TENSOR_CORE_MULTIPLE == 0
    if aligned and (low <= model.head_dim <= high or not review.has_customary_size):
        return
    heads = [n for n in range(1, model.hidden_size + 1) if _is_good_head_dim(model.hidden_size, n)]
    nearest = min(heads, key=lambda n: abs(n - model.num_attention_heads), default=None)
    yield Finding(
        "note" if aligned else "warning",
        "megastable.model.num_attention_heads",
        f"{model.hidden_size} / {model.num_attention_heads} heads is a head dimension of {model.head_dim}, "
        + (f"outside the customary {low} to {high}" if aligned else "no multiple of 8, which fused attention needs"),
        f'"num_attention_heads": {nearest} (head dimension {model.hidden_size // nearest})'
        if nearest
        else "a hidden_size that is a multiple of 128",
    )


def _is_good_head_dim(hidden_size: int, num_heads: int) -> bool:
    head_dim, remainder = divmod(hidden_size, num_heads)
    return remainder == 0 and head_dim % TENSOR_CORE_MULTIPLE == 0 and HEAD_DIMS[0] <= head_dim <= HEAD_DIMS[1]


def vocabulary_suits_the_kernels(review: Review) -> Iterator[Finding]:
    """The head is the largest product of a step; each tensor rank's share is a multiple of 128."""
    rows, size = review.model.padded_vocab_size, review.plan.layout.tensor_parallel_size
    multiple = VOCABULARY_MULTIPLE * size
    if rows % multiple:
        share = f"{rows // size:,} rows a tensor rank are" if size > 1 else f"{rows:,} rows are"
        yield Finding(
            "note",
            "megastable.model.vocab_padding_multiple",
            f"{share} no multiple of {VOCABULARY_MULTIPLE}: the head's product, the largest of a step, runs on ragged "
            "tiles",
            f'"vocab_padding_multiple": {multiple}',
        )


if TYPE_CHECKING:
    from megastable.planning.preflight.review import Review

BYTES_PER_TOKEN = 4
"""Of English text under a trained tokenizer, roughly."""


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
