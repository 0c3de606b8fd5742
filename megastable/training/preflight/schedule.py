"""Rules of the run's length and warmup, and of its seed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from megastable.core.batch_rampup import RampPhase
from megastable.training.preflight.finding import Finding
from megastable.training.preflight.review import Review

WARMUP_PERCENT = (5, 10)
FEWEST_STEPS = 100
"""Of a shorter run, a share of the updates is a handful."""


def warmup_has_customary_length(review: Review) -> Iterator[Finding]:
    """Between 5 and 10% of the updates: updates, not samples, which a ramp makes two different shares."""
    plan, key = review.plan, "megastable.lr_schedule.warmup"
    warmup_samples = review.run.megastable.lr_schedule.warmup.to_samples(
        plan.length.total_samples, review.model.seq_length
    )
    total = plan.length.total_steps
    shortest, longest = (_samples_before(plan.phases, math.ceil(total * share / 100)) for share in WARMUP_PERCENT)
    instead = f'"warmup": {shortest}' + (f" (samples; up to {longest})" if longest > shortest else " (samples)")
    if warmup_samples == 0:
        lr = review.run.optimizer.params.lr
        yield Finding("warning", key, f"0: the first update already has the full learning rate, {lr:g}", instead)
        return
    updates = steps_before(plan.phases, warmup_samples)
    if total < FEWEST_STEPS or shortest <= warmup_samples <= longest:
        return
    ramp = ", because the ramp makes early updates small" if len(plan.phases) > 1 and warmup_samples > longest else ""
    yield Finding(
        "note",
        key,
        f"{warmup_samples:,} samples are {updates:,} of {total:,} updates ({updates / total:.1%}){ramp}; "
        f"customary are {WARMUP_PERCENT[0]} to {WARMUP_PERCENT[1]}%",
        instead,
    )


def steps_before(phases: Sequence[RampPhase], samples: int) -> int:
    """Steps that start before ``samples`` are consumed."""
    steps = 0
    for phase in phases:
        if phase.first_sample < samples:
            needed = -(-(samples - phase.first_sample) // phase.batch.global_batch_size)
            steps = phase.first_step + min(phase.num_steps, needed)
    return steps


def _samples_before(phases: Sequence[RampPhase], step: int) -> int:
    """Samples consumed when ``step`` steps are done."""
    phase = next(phase for phase in reversed(phases) if phase.first_step <= step)
    return phase.first_sample + (step - phase.first_step) * phase.batch.global_batch_size


def seed_was_chosen(review: Review) -> Iterator[Finding]:
    """Runs that leave the seed alone share it, so that two of them are no independent repetition."""
    training = review.run.megastable.training
    if "seed" not in training.model_fields_set:
        yield Finding(
            "note",
            "megastable.training.seed",
            f"left at its default {training.seed}: another run that leaves it, too, is no independent repetition",
            '"seed": a number of your choice',
        )
