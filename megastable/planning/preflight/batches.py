"""Rules of the global batch: its ramp on the layout, the pipeline's idle time, and the customary sizes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from megastable.config.batch_rampup import HOW_TO_CALIBRATE
from megastable.core.batch_rampup import Batch
from megastable.core.pipeline_cost import bubble
from megastable.planning.micro_batches import describe_choice, is_data_sheet
from megastable.planning.preflight.review import LEAST_PARAMETERS, Finding, Level, Review, short_count, size_class

RAMP = "megastable.batch_rampup"
MOST_IDLE = 0.2
FAR_TOO_IDLE = 1 / 3
"""Shares of a pipeline's time in which its stages wait: the most that passes, and that from which it is a warning."""
LARGEST_JUMP = 4
"""Times by which one step of a ramp may raise the global batch: doublings are customary."""
FAR_OUTSIDE = 4
"""Times by which a size leaves its customary range before that is a warning."""


def fewest_microbatches(num_stages: int) -> int:
    """Count the micro-batches that keep the bubble of so many stages at ``MOST_IDLE``."""
    # (p - 1) / (m + p - 1) is a fifth where (p - 1) / m is a quarter.
    return 4 * (num_stages - 1)


def bubble_at_the_start_is_small(review: Review) -> Iterator[Finding]:
    """Find the largest bubble of the run, which its smallest batch has, too large."""
    batch = review.plan.phases[0].batch
    idle = bubble(review.plan.layout.num_stages, batch.num_microbatches)
    if idle <= MOST_IDLE:
        return
    level: Level = "warning"
    key = _key(review, "final")
    message = _idle_time(review, batch)
    # Under a ramp the bubble is temporary, so that a moderate one may be worth what small first batches give.
    if len(review.plan.phases) > 1:
        level = "warning" if idle > FAR_TOO_IDLE else "note"
        key = _key(review, "start")
        message += " until the ramp has grown"
    yield Finding(level, key, message, _larger_batch(review, batch))


def bubble_stays_small(review: Review) -> Iterator[Finding]:
    """Find the bubble at the end of a ramp too large: larger micro-batches may undo what the ramp has won."""
    layout = review.plan.layout
    last = review.plan.phases[-1].batch
    # A run of one batch has been judged by the rule of its start.
    if len(review.plan.phases) > 1 and bubble(layout.num_stages, last.num_microbatches) > MOST_IDLE:
        yield Finding(
            "warning", _key(review, "final"), f"{_idle_time(review, last)} to the end", _larger_batch(review, last)
        )


def _key(review: Review, size: str) -> str:
    """Return the key at which the file has the ``start`` or ``final`` size."""
    # A ramp that is listed step by step has all its sizes under one key.
    if review.run.megastable.batch_rampup.steps:
        return f"{RAMP}.steps"
    return f"{RAMP}.{size}"


def _idle_time(review: Review, batch: Batch) -> str:
    stages = review.plan.layout.num_stages
    return (
        f"batch {batch.global_batch_size} gives a replica num_microbatches = {batch.num_microbatches}, which leaves "
        f"its {stages} stages idle {bubble(stages, batch.num_microbatches):.0%} of the time"
    )


def _larger_batch(review: Review, batch: Batch) -> str:
    layout = review.plan.layout
    needed = fewest_microbatches(layout.num_stages) * batch.micro_batch_size * layout.data_parallel_size
    # A size that was chosen for its speed is the best already: a smaller one would be slower.
    chosen = review.run.megastable.batch_rampup.chooses_micro_batch_sizes
    smaller = ", a smaller micro-batch" if batch.micro_batch_size > 1 and not chosen else ""
    return f"a batch of at least {needed}{smaller} or fewer stages (at most {MOST_IDLE:.0%} idle)"


def ramp_ends_within_the_run(review: Review) -> Iterator[Finding]:
    """Find a ramp longer than the run, mostly a number in the wrong unit: samples of all increments, or of one."""
    schedule = review.plan.ramp.schedule
    length = review.plan.length
    last_size = review.plan.phases[-1].batch.global_batch_size
    # The last step's first sample decides its batch; a boundary within the step comes too late for the run.
    boundary = schedule.next_boundary(length.last_step_start)
    if boundary is not None:
        yield Finding(
            "warning",
            RAMP,
            f"the run ends after {length.total_samples:,} samples at batch {last_size}, before the ramp does: its next "
            f"size, {schedule.at(boundary)}, begins at sample {boundary:,}",
            "a shorter ramp (ramp_samples counts all increments, samples_per_increment one), or a longer run",
        )


def chosen_micro_batches_are_shown(review: Review) -> Iterator[Finding]:
    """Show what "auto" has chosen, before a launch records it; and that a data sheet leaves it nothing to choose."""
    ramp = review.run.megastable.batch_rampup
    if not ramp.chooses_micro_batch_sizes:
        return
    # The choice is no fault, so that there is a suggestion only where it could have been a better one.
    instead = "nothing to change; the launch records them in config.json"
    if is_data_sheet(ramp.calibration):
        instead = f"{HOW_TO_CALIBRATE}: a data sheet gives micro-batches no cost of their own, so the smallest win"
    yield Finding("note", f"{RAMP}.micro_batch_size", describe_choice(review.plan), instead)


def micro_batch_steps_are_reached(review: Review) -> Iterator[Finding]:
    """Find an entry above every batch of the run, which never applies."""
    # No ramp falls, so that the last phase has the largest batch of the run.
    largest = review.plan.phases[-1].batch.global_batch_size
    steps = review.run.megastable.batch_rampup.micro_batch_size_steps
    unused = [(start, size) for start, size in steps if start > largest]
    if unused:
        start, size = unused[0]
        yield Finding(
            "warning",
            f"{RAMP}.micro_batch_size_steps",
            f"micro-batches of {size} begin at a global batch of {start}, and the largest of the run is {largest}",
            f"a first number of at most {largest}, or remove the entry",
        )


def global_batch_is_customary(review: Review) -> Iterator[Finding]:
    """Compare the largest global batch with the range for the model's size."""
    customary = size_class(review.num_parameters)
    largest = review.plan.phases[-1].batch.global_batch_size
    low, high = customary.global_batch_size
    if not review.has_customary_size or low <= largest <= high:
        return
    side = "more updates, on noisier gradients" if largest < low else "fewer updates from the same data"
    yield Finding(
        _level(largest, low, high),
        _key(review, "final"),
        f"{largest:,} samples for {short_count(review.num_parameters)} parameters: {side}; customary {customary.name} "
        f"are {low:,} to {high:,}",
        f"a largest batch of {low:,} to {high:,}, when the learning rate follows it",
    )


def batch_grows_gradually(review: Review) -> Iterator[Finding]:
    """Find a global batch that jumps: the noise of the gradient falls at once, and the learning rate no longer fits."""
    for before, after in pairwise(phase.batch.global_batch_size for phase in review.plan.phases):
        if after > LARGEST_JUMP * before:
            yield Finding(
                "warning",
                _key(review, "increment"),
                f"the global batch jumps from {before:,} to {after:,}, by {after / before:.3g} times: the learning "
                "rate that suits the one may not suit the other, and Adam's second moments are of noisier gradients",
                f"steps between them, each of at most {LARGEST_JUMP} times the one before",
            )


def accumulation_is_customary(review: Review) -> Iterator[Finding]:
    """Compare the micro-batches of a replica and step with the range for the model's size.

    Not judged where the number of replicas is only assumed, nor where the sizes were chosen for their speed.
    """
    batch = review.plan.phases[-1].batch
    replicas = review.plan.layout.data_parallel_size
    low, high = size_class(review.num_parameters).accumulation_steps
    # A pipeline may need more than is customary, to keep its bubble small.
    high = max(high, fewest_microbatches(review.plan.layout.num_stages))
    steps = batch.num_microbatches
    chosen = review.run.megastable.batch_rampup.chooses_micro_batch_sizes
    if not review.has_customary_size or review.world_size_was_assumed or chosen or low <= steps <= high:
        return
    instead = "smaller micro-batches or fewer replicas"
    if steps > high:
        instead = "larger micro-batches, where memory allows, or more replicas"
    yield Finding(
        _level(steps, low, high),
        "train_micro_batch_size_per_gpu",
        f"batch {batch.global_batch_size:,} over {replicas} replicas in micro-batches of {batch.micro_batch_size} is "
        f"{steps} accumulation steps; customary for {short_count(review.num_parameters)} parameters on "
        f"{review.plan.layout.num_stages} stages are {low} to {high}",
        instead,
    )


def _level(value: int, low: int, high: int) -> Level:
    far_outside = value * FAR_OUTSIDE <= low or value >= high * FAR_OUTSIDE
    return "warning" if far_outside else "note"


def size_is_customary(review: Review) -> Iterator[Finding]:
    """Say, once, where a model is too small for the customary ranges, which were not applied."""
    if not review.has_customary_size:
        yield Finding(
            "note",
            "megastable.model",
            f"{short_count(review.num_parameters)} parameters are far below the 125M from which customs are known: "
            "batch, accumulation and head width were not held against them",
            f"nothing to change in an experiment; the ranges apply from {short_count(LEAST_PARAMETERS)}",
        )
