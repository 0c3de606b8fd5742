"""Rules of the global batch: its ramp on the layout, the pipeline's idle time, and the customary sizes."""

from __future__ import annotations

from collections.abc import Iterator

from megastable.config.batch_rampup import HOW_TO_CALIBRATE
from megastable.core.batch_rampup import Batch
from megastable.core.pipeline_cost import bubble
from megastable.planning.micro_batches import describe_choice, is_data_sheet
from megastable.planning.preflight.review import LEAST_PARAMETERS, Finding, Level, Review, short_count, size_class

RAMP = "megastable.batch_rampup"
MOST_IDLE = 0.2
FAR_TOO_IDLE = 1 / 3
FAR_OUTSIDE = 4
"""Times by which a size leaves its customary range before that is a warning."""


def fewest_microbatches(num_stages: int) -> int:
    """Micro-batches that keep the bubble at ``MOST_IDLE``, for which (p - 1) / m is 1 / 4."""
    return 4 * (num_stages - 1)


def bubble_at_the_start_is_small(review: Review) -> Iterator[Finding]:
    """The smallest batch of the run has the largest bubble."""
    layout, batch = review.plan.layout, review.plan.phases[0].batch
    idle = bubble(layout.num_stages, batch.num_microbatches)
    if idle <= MOST_IDLE:
        return
    constant = len(review.plan.phases) == 1
    yield Finding(
        "warning" if idle > FAR_TOO_IDLE or constant else "note",
        _key(review, "final" if constant else "start"),
        f"{_idle_time(review, batch)}{'' if constant else ' until the ramp has grown'}",
        _larger_batch(review, batch),
    )


def bubble_stays_small(review: Review) -> Iterator[Finding]:
    """A larger micro-batch makes fewer of them, which may undo what the ramp has won."""
    layout = review.plan.layout
    last = review.plan.phases[-1].batch
    if len(review.plan.phases) > 1 and bubble(layout.num_stages, last.num_microbatches) > MOST_IDLE:
        yield Finding(
            "warning", _key(review, "final"), f"{_idle_time(review, last)} to the end", _larger_batch(review, last)
        )


def _key(review: Review, size: str) -> str:
    """Where the file has the ``start`` or ``final`` size."""
    return f"{RAMP}.{'steps' if review.run.megastable.batch_rampup.steps else size}"


def _idle_time(review: Review, batch: Batch) -> str:
    stages = review.plan.layout.num_stages
    return (
        f"batch {batch.global_batch_size} gives a replica num_microbatches = {batch.num_microbatches}, which leaves "
        f"its {stages} stages idle {bubble(stages, batch.num_microbatches):.0%} of the time"
    )


def _larger_batch(review: Review, batch: Batch) -> str:
    layout = review.plan.layout
    needed = fewest_microbatches(layout.num_stages) * batch.micro_batch_size * layout.data_parallel_size
    chosen = review.run.megastable.batch_rampup.chooses_micro_batch_sizes  # and a smaller one would be slower
    smaller = ", a smaller micro-batch" if batch.micro_batch_size > 1 and not chosen else ""
    return f"a batch of at least {needed}{smaller} or fewer stages (at most {MOST_IDLE:.0%} idle)"


def ramp_ends_within_the_run(review: Review) -> Iterator[Finding]:
    """A ramp longer than the run is mostly a number in the wrong unit: samples of all increments, or of one."""
    schedule, length = review.plan.ramp.schedule, review.plan.length
    last_size = review.plan.phases[-1].batch.global_batch_size
    boundary = schedule.next_boundary(length.last_step_start)
    if boundary is not None:
        yield Finding(
            "warning",
            RAMP,
            f"the run ends after {length.total_samples:,} samples at batch {last_size}, before the ramp does: its next "
            f"size, {schedule.at(boundary)}, begins at sample {boundary:,}",
            "a shorter ramp (ramp_samples counts all increments, samples_per_increment one), or a longer run",
        )


def chosen_micro_batches_are_told(review: Review) -> Iterator[Finding]:
    """What "auto" has chosen, before a launch records it; and that a data sheet leaves it nothing to choose."""
    ramp = review.run.megastable.batch_rampup
    if not ramp.chooses_micro_batch_sizes:
        return
    instead = "nothing to change; the launch records them in config.json"
    if is_data_sheet(ramp.calibration):
        instead = f"{HOW_TO_CALIBRATE}: a data sheet gives micro-batches no cost of their own, so the smallest win"
    yield Finding("note", f"{RAMP}.micro_batch_size", describe_choice(review.plan), instead)


def micro_batch_steps_are_reached(review: Review) -> Iterator[Finding]:
    """An entry above every batch of the run never applies."""
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
    """The largest global batch against the range for the model's size."""
    customary, largest = size_class(review.num_parameters), review.plan.phases[-1].batch.global_batch_size
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


def accumulation_is_customary(review: Review) -> Iterator[Finding]:
    """Micro-batches of a replica and step, against the range for the model's size; a pipeline may need more.

    Not judged where the number of replicas is only assumed, nor where the sizes were chosen for their speed.
    """
    batch, replicas = review.plan.phases[-1].batch, review.plan.layout.data_parallel_size
    low, high = size_class(review.num_parameters).accumulation_steps
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
    return "warning" if value * FAR_OUTSIDE <= low or value >= high * FAR_OUTSIDE else "note"


def size_is_customary(review: Review) -> Iterator[Finding]:
    """Says once that the ranges were not applied."""
    if not review.has_customary_size:
        yield Finding(
            "note",
            "megastable.model",
            f"{short_count(review.num_parameters)} parameters are far below the 125M from which customs are known: "
            "batch, accumulation and head width were not held against them",
            f"nothing to change in an experiment; the ranges apply from {short_count(LEAST_PARAMETERS)}",
        )
