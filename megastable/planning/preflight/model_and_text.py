"""Rules of the model and of the text that it reads.

The model: std of the first weights against width and depth, head dimension, vocabulary. The text: whether it is there,
and whether it holds a batch, estimated from the sizes of its files without reading them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from megastable.config import BytesTokenizerConfig
from megastable.config.data import states_validation
from megastable.core.families.registry import FAMILIES, expressing_families, nearest_family
from megastable.core.init_std import INIT_SCHEMES, MatrixSize, megatron_530b, residual_output_std
from megastable.planning.preflight.review import Finding, Level, Review

STD_RATIOS = (0.25, 2.0)
"""Of a std to sqrt(1 / (3 hidden)). GPT-2's 0.02 is 1.0 at its width 768, and 3.7 at 11,600."""
DEEP_FROM_LAYERS = 24
HEAD_DIMS = (64, 128)
TENSOR_CORE_MULTIPLE = 8
"""16-bit products whose sizes are multiples of it run on tensor cores without padding."""
VOCABULARY_MULTIPLE = 128
"""Rows of a tile of large matrix products."""
BYTES_PER_TOKEN = 4
"""Of English text under a trained tokenizer, roughly."""


def std_fits_the_width(review: Review) -> Iterator[Finding]:
    """Compare the std of fresh weights with one that falls with the root of the width, as Megatron's 530B model has."""
    init = review.run.megastable.init
    hidden = review.model.hidden_size
    stds = {"std": INIT_SCHEMES[init.scheme](MatrixSize.square(hidden), init.std), "head_std": init.head_std}
    # An untied embedding may have any std, since a norm follows it; a tied one makes the logits, too.
    if review.model.tie_embeddings:
        stds["embedding_std"] = init.embedding_std
    reference = megatron_530b(MatrixSize.square(hidden), None)
    low, high = STD_RATIOS
    for key, std in stds.items():
        # None stands for the std of the other matrices, which is judged under its own key.
        if std is None or low <= std / reference <= high:
            continue
        effect = "activations and logits start too large" if std > reference else "the signal starts too faint"
        instead = f'"{key}": {reference:.2g}, or null'
        if key == "std":
            instead = '"scheme": "megatron_530b", without std'
        yield Finding(
            "warning",
            f"megastable.init.{key}",
            f"{std:g} at width {hidden} is {std / reference:.2g} times sqrt(1/(3 x {hidden})) = {reference:.3g}: "
            f"{effect}",
            instead,
        )


def std_fits_the_depth(review: Review) -> Iterator[Finding]:
    """Find a deep model whose blocks add to the residual stream at full size.

    Every block adds twice, so that the stream's variance grows with the depth (Radford et al., GPT-2, section 2.3).
    """
    init = review.run.megastable.init
    model = review.model
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
    """Find a head dimension that fused attention cannot use (no multiple of 8), or that is not customary."""
    model = review.model
    low, high = HEAD_DIMS
    aligned = model.head_dim % TENSOR_CORE_MULTIPLE == 0
    if aligned and (low <= model.head_dim <= high or not review.has_customary_size):
        return
    level: Level = "warning"
    why = "no multiple of 8, which fused attention needs"
    if aligned:
        level = "note"
        why = f"outside the customary {low} to {high}"
    instead = "a hidden_size that is a multiple of 128"
    # The suggestion keeps the width, on which learning rate and std depend, and moves the heads as little as it can.
    heads = [n for n in range(1, model.hidden_size + 1) if _is_good_head_dim(model.hidden_size, n)]
    if heads:
        nearest = min(heads, key=lambda n: abs(n - model.num_attention_heads))
        instead = f'"num_attention_heads": {nearest} (head dimension {model.hidden_size // nearest})'
    yield Finding(
        level,
        "megastable.model.num_attention_heads",
        f"{model.hidden_size} / {model.num_attention_heads} heads is a head dimension of {model.head_dim}, {why}",
        instead,
    )


def _is_good_head_dim(hidden_size: int, num_heads: int) -> bool:
    head_dim, remainder = divmod(hidden_size, num_heads)
    return remainder == 0 and head_dim % TENSOR_CORE_MULTIPLE == 0 and HEAD_DIMS[0] <= head_dim <= HEAD_DIMS[1]


def vocabulary_suits_the_kernels(review: Review) -> Iterator[Finding]:
    """Find a vocabulary whose share on a tensor rank is no multiple of 128, on which the head's product runs slowly."""
    rows = review.model.padded_vocab_size
    ranks = review.plan.layout.tensor_parallel_size
    # The vocabulary is split over the tensor ranks, and each rank's share is a product of its own.
    multiple = VOCABULARY_MULTIPLE * ranks
    if rows % multiple:
        share = f"{rows:,} rows are"
        if ranks > 1:
            share = f"{rows // ranks:,} rows a tensor rank are"
        yield Finding(
            "note",
            "megastable.model.vocab_padding_multiple",
            f"{share} no multiple of {VOCABULARY_MULTIPLE}: the head's product, the largest of a step, runs on ragged "
            "tiles",
            f'"vocab_padding_multiple": {multiple}',
        )


def some_class_expresses_the_model(review: Review) -> Iterator[Finding]:
    """Find a model that no class of `transformers` computes, so that what is trained stays here."""
    if expressing_families(review.model):
        return
    family, contradictions = nearest_family(review.model)
    reasons = ", ".join(str(contradiction) for contradiction in contradictions)
    yield Finding(
        "note",
        f"megastable.model.{contradictions[0].key}",
        f"none of the {len(FAMILIES)} known classes of transformers can express this model, which therefore cannot be "
        f"exported; the nearest is {family.class_name}, where {reasons}",
        f'"family": "{family.name}" and no other value of these keys, for a model that is exported',
    )


def text_is_here(review: Review) -> Iterator[Finding]:
    """Find a path at which there is no text; it is no error, since it may be right on another machine."""
    if review.text is not None and review.text.fault:
        # The fault of a source begins with its key, which a finding names itself.
        key, _, message = review.text.fault.partition(": ")
        if not key.startswith("megastable."):
            key, message = "megastable.data.source.path", review.text.fault
        yield Finding(
            "warning",
            key,
            message,
            "mend the path, unless it is meant for another machine",
        )


def text_holds_a_batch(review: Review) -> Iterator[Finding]:
    """Find a text whose epoch has fewer samples than one step takes."""
    text = review.text
    data = review.run.megastable.data
    if text is None or text.fault:
        return
    largest = review.plan.phases[-1].batch.global_batch_size
    training_share = 1 - data.validation_fraction
    # A byte-level tokenizer makes at most a token of every byte, and one more at the end of a document. Documents are
    # kept for validation whole, and those may be the shortest, so that nearly all bytes may be for training.
    most_tokens = text.num_bytes + text.num_documents
    is_counted = text.num_tokens is not None or isinstance(data.tokenizer, BytesTokenizerConfig)
    if text.num_tokens is not None:
        most_tokens = text.num_tokens
        # Tokens that name a validation pair of their own keep no share.
        training_share = 1.0 if states_validation(data.source) else training_share
    likely_tokens = training_share * most_tokens
    if not is_counted:
        likely_tokens = training_share * (text.num_bytes / BYTES_PER_TOKEN)
    # As a launch counts: the last sample of a batch needs a single label, but there has to be one whole sample.
    needed = max((largest - 1) * review.model.seq_length + 2, review.model.seq_length + 1)
    if likely_tokens >= needed:
        return
    # Too few even at a token a byte is certain; the usual bytes of a token only make it likely.
    if most_tokens < needed:
        level: Level = "error"
        amount = f"at most {most_tokens:,.0f} training tokens"
    else:
        level = "warning"
        estimate = f"from {text.num_bytes:,} bytes, {BYTES_PER_TOKEN} a token"
        if text.num_tokens is not None:
            estimate = f"of {text.num_tokens:,}, the others are for validation"
        amount = f"an estimated {likely_tokens:,.0f} training tokens ({estimate})"
    fitting = math.floor(likely_tokens / review.model.seq_length)  # samples
    instead = "more text, or a shorter sample"
    if fitting:
        instead = f"more text, or a largest global batch of at most {fitting:,}"
    yield Finding(
        level,
        "megastable.data.source",
        f"{amount} are less than the {needed:,} of one step of {largest:,} x {review.model.seq_length:,}: a batch "
        "would hold the same samples twice",
        instead,
    )


def evaluation_has_text(review: Review) -> Iterator[Finding]:
    """Find an evaluation on a text of one document, which is for training."""
    text = review.text
    interval = review.run.megastable.training.eval_interval
    if text is None or text.fault or interval == 0 or text.num_documents > 1:
        return
    yield Finding(
        "error",
        "megastable.training.eval_interval",
        f"{interval}, but the text is a single document, which is for training: there is nothing to evaluate on",
        '"eval_interval": 0, or more documents',
    )
