"""Rules of the updates: clipping, betas, eps, the learning rate against size and width, the warmup, and the seed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from megastable.core.batch_rampup import RampPhase
from megastable.core.init_std import MatrixSize, megatron_530b
from megastable.planning.preflight.review import Finding, Review, customary_peak_lr, short_count

CLIP_NORMS = (0.1, 1.0)
LARGEST_EPS = 1e-6
LR_TOLERANCE = 3.0
"""Times by which a learning rate may exceed that of GPT-3's table."""
LARGEST_LR_SHARE_OF_STD = 0.1
WARMUP_PERCENT = (5, 10)
FIRST_STEPS = 3
FEWEST_STEPS = 100
"""Of a shorter run, a share of the updates is a handful."""


def clip_norm_is_customary(review: Review) -> Iterator[Finding]:
    """Find a clip norm far from the 1.0 at which GPT-3, BLOOM, PaLM and Llama clipped."""
    clip_norm = review.run.clip_norm
    lowest, highest = CLIP_NORMS
    # Unclipped fp16 is an error, which another rule finds.
    if lowest <= clip_norm <= highest or (clip_norm == 0 and review.run.fp16.enabled):
        return
    if clip_norm == 0:
        why = "no clipping: one bad batch moves the weights by its full norm"
    elif clip_norm < lowest:
        why = f"{clip_norm:g} is far below a healthy gradient norm: every step is clipped"
    else:
        why = f"{clip_norm:g} clips hardly anything but what has already diverged"
    yield Finding("warning", "gradient_clipping", f"{why}; customary are 0.5 and 1.0", '"gradient_clipping": "auto"')


def betas_are_in_order(review: Review) -> Iterator[Finding]:
    """Find a first moment that remembers longer than the second, which leaves a step without a bound.

    Kingma and Ba, arXiv 1412.6980, section 2.1.
    """
    beta1, beta2 = review.run.optimizer.params.betas
    if beta1 > beta2:
        yield Finding(
            "warning",
            "optimizer.params.betas",
            f"beta1 {beta1:g} is above beta2 {beta2:g}, so the mean of the gradient outlives that of its square and a "
            "step has no bound; are they swapped?",
            f'"betas": [{beta2:g}, {beta1:g}], customary [0.9, 0.95]',
        )


def eps_leaves_adam_adaptive(review: Review) -> Iterator[Finding]:
    """Find an eps above the gradients of single weights, which turns Adam into slow momentum."""
    eps = review.run.optimizer.params.eps
    if eps > LARGEST_EPS:
        yield Finding(
            "warning",
            "optimizer.params.eps",
            f"{eps:g} is above {LARGEST_EPS:g}: weights whose gradients are smaller hardly move, in large models most",
            '"eps": 1e-8',
        )


def lr_fits_the_size(review: Review) -> Iterator[Finding]:
    """Compare the learning rate with GPT-3's table, in which it falls with the size of the model."""
    lr = review.run.optimizer.params.lr
    customary = customary_peak_lr(review.num_parameters)
    if review.has_customary_size and lr > LR_TOLERANCE * customary:
        yield Finding(
            "warning",
            "optimizer.params.lr",
            f"{lr:g} is {lr / customary:.1f} times the {customary:.1e} that GPT-3's table gives "
            f"{short_count(review.num_parameters)} parameters at width {review.model.hidden_size}",
            f'"lr": {customary:.1e}',
        )


def lr_fits_the_width(review: Review) -> Iterator[Finding]:
    """Compare the learning rate with the std of fresh weights, where the model is too small for ``lr_fits_the_size``.

    Adam moves a weight by about the learning rate, and the std falls with the width.
    """
    lr = review.run.optimizer.params.lr
    std = megatron_530b(MatrixSize.square(review.model.hidden_size), None)
    if not review.has_customary_size and lr > LARGEST_LR_SHARE_OF_STD * std:
        yield Finding(
            "warning",
            "optimizer.params.lr",
            f"an update moves a weight by about {lr:g}, {lr / std:.0%} of the std {std:.3g} that weights of width "
            f"{review.model.hidden_size} start with",
            f'"lr": at most {LARGEST_LR_SHARE_OF_STD * std:.1e}',
        )


def some_step_learns(review: Review) -> Iterator[Finding]:
    """Find a run whose every step starts where the schedule is 0: it is too short, or its decay is."""
    plan = review.plan
    # A schedule is 0 at the very start of a warmup and from the end of a decay to 0 on, and nowhere between. So the
    # first steps show whether any step starts between them.
    starts = [
        (phase.first_sample + step * phase.batch.global_batch_size, phase.batch)
        for phase in plan.phases[:FIRST_STEPS]
        for step in range(min(phase.num_steps, FIRST_STEPS))
    ]
    if any(plan.learning_rate(start, batch) > 0 for start, batch in starts):
        return
    yield Finding(
        "warning",
        "megastable.lr_schedule",
        f"the learning rate is 0 at every one of the {plan.length.total_steps:,} steps: a step takes the learning rate "
        "of its first sample, which is 0 at the start of a warmup and min_lr in the last step",
        'a longer run or decay, "warmup": 0, or a min_lr above 0',
    )


def warmup_has_customary_length(review: Review) -> Iterator[Finding]:
    """Find a warmup outside 5 to 10% of the updates: updates, not samples, which a ramp makes two different shares."""
    plan = review.plan
    key = "megastable.lr_schedule.warmup"
    warmup_samples = review.run.megastable.lr_schedule.warmup.to_samples(
        plan.length.total_samples, review.model.seq_length
    )
    total = plan.length.total_steps
    # The suggestion is in samples, which the file counts in, at the steps where those shares of the updates are done.
    shortest, longest = (_samples_before(plan.phases, math.ceil(total * share / 100)) for share in WARMUP_PERCENT)
    instead = f'"warmup": {shortest} (samples)'
    if longest > shortest:
        instead = f'"warmup": {shortest} (samples; up to {longest})'
    if warmup_samples == 0:
        lr = review.run.optimizer.params.lr
        yield Finding("warning", key, f"0: the first update already has the full learning rate, {lr:g}", instead)
        return
    updates = steps_before(plan.phases, warmup_samples)
    if total < FEWEST_STEPS or shortest <= warmup_samples <= longest:
        return
    ramp = ""
    if len(plan.phases) > 1 and warmup_samples > longest:
        ramp = ", because the ramp makes early updates small"
    yield Finding(
        "note",
        key,
        f"{warmup_samples:,} samples are {updates:,} of {total:,} updates ({updates / total:.1%}){ramp}; "
        f"customary are {WARMUP_PERCENT[0]} to {WARMUP_PERCENT[1]}%",
        instead,
    )


def steps_before(phases: Sequence[RampPhase], samples: int) -> int:
    """Count the steps that start before ``samples`` are consumed."""
    steps = 0
    for phase in phases:
        if phase.first_sample < samples:
            # Rounded up, in whole numbers: a step that starts before the last of the samples counts.
            needed = -(-(samples - phase.first_sample) // phase.batch.global_batch_size)
            steps = phase.first_step + min(phase.num_steps, needed)
    return steps


def _samples_before(phases: Sequence[RampPhase], step: int) -> int:
    """Count the samples that are consumed when ``step`` steps are done."""
    phase = next(phase for phase in reversed(phases) if phase.first_step <= step)
    return phase.first_sample + (step - phase.first_step) * phase.batch.global_batch_size


def seed_was_chosen(review: Review) -> Iterator[Finding]:
    """Find a run that leaves the seed at its default, so that two such runs are no independent repetition."""
    training = review.run.megastable.training
    # A file that writes the default's number has chosen it.
    if "seed" not in training.model_fields_set:
        yield Finding(
            "note",
            "megastable.training.seed",
            f"left at its default {training.seed}: another run that leaves it, too, is no independent repetition",
            '"seed": a number of your choice',
        )
