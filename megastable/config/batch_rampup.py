"""The global batch ramp and its micro-batches, and the rules that make a ramp sound."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import Field

from megastable.config.limits import (
    LARGEST_BATCH,
    LONGEST_LIST,
    MOST_INCREMENTS,
    MOST_SAMPLES,
    MOST_TRIED_BY_AUTO,
)
from megastable.config.parallelism import PipelineConfig
from megastable.config.reading.faults import Fault
from megastable.config.section import PathText, Section
from megastable.core.batch_rampup import BatchRampup, GlobalBatchSchedule, LinearRamp, StepRamp
from megastable.core.devices import DEVICES

SamplePosition = Annotated[int, Field(ge=0, le=MOST_SAMPLES)]
NumSamples = Annotated[int, Field(ge=1, le=MOST_SAMPLES)]
BatchSize = Annotated[int, Field(ge=1, le=LARGEST_BATCH)]
SizeChanges = Annotated[tuple[tuple[BatchSize, BatchSize], ...], Field(max_length=LONGEST_LIST)]
"""Micro-batch sizes by the global batch from which they hold."""
SIZE_KEYS = {"start", "increment", "final", "ramp_samples", "samples_per_increment", "steps"}
"""The keys of the global batch, whose combinations are the ramp's forms; the other keys are about micro-batches."""
RAMP_FORMS = (
    'give "final" alone (a constant batch), or "start", "increment", "final" and exactly one of "ramp_samples" '
    '(the whole ramp) and "samples_per_increment", or "steps" alone'
)
HOW_TO_CALIBRATE = (
    "a file that benchmarks/tflops_vs_gbs.py --json or megastable plan --device cpu --save-calibration has written"
)


class BatchRampupConfig(Section):
    """How the global batch grows with the samples consumed. Three forms are legal:

    only ``final`` (a constant batch); ``start``, ``increment``, ``final`` and exactly one of ``ramp_samples`` and
    ``samples_per_increment``; or ``steps`` alone.
    """

    start: BatchSize | None = Field(default=None, description="Global batch size (samples) of the first step.")
    increment: BatchSize | None = Field(
        default=None, description="Samples by which the global batch grows; must divide final - start."
    )
    final: BatchSize | None = Field(
        default=None, description="Global batch size (samples) at the end of the ramp; alone: of every step."
    )
    ramp_samples: NumSamples | None = Field(
        default=None,
        description="Samples that the WHOLE ramp takes, over all increments together (Megatron-LM's third number of "
        "--rampup-batch-size). BLOOM-176B: 9765625.",
    )
    samples_per_increment: NumSamples | None = Field(
        default=None, description="Samples between two increments; the whole ramp takes this times the increments."
    )
    steps: tuple[tuple[SamplePosition, BatchSize], ...] | None = Field(
        default=None,
        max_length=LONGEST_LIST,
        json_schema_extra={"minItems": 1},
        description="The ramp as a list of [from_sample, global_batch_size]; the first from_sample is 0.",
    )
    micro_batch_size_steps: SizeChanges = Field(
        default=(),
        description="List of [from_global_batch_size, micro_batch_size]; below the first entry "
        "train_micro_batch_size_per_gpu holds. BLOOM-176B: [[784, 2]].",
    )
    micro_batch_size: Literal["auto"] | None = Field(
        default=None,
        description='"auto": of every batch the split into micro-batches that calibration finds fastest within the '
        "memory, chosen before the run; leave train_micro_batch_size_per_gpu and micro_batch_size_steps out then. "
        "null: those two say it.",
    )
    calibration: Annotated[PathText, Field(min_length=1)] | None = Field(
        default=None,
        description=f'What "auto" goes by: {HOW_TO_CALIBRATE}, relative to the working directory; or the name of a '
        f"device ({', '.join(DEVICES)}), whose data sheet gives a micro-batch no cost of its own, so that the smallest "
        "is always the fastest.",
    )
    # A key of the file, so that a resumed run splits its batches as before even if the calibration has changed since.
    chosen_micro_batch_sizes: SizeChanges = Field(
        default=(),
        description='What "auto" has chosen, as a list of [from_global_batch_size, micro_batch_size]. Written by the '
        "program into config.json and checkpoints. A run that has it, or continues a checkpoint that has, keeps to it, "
        "whatever has become of the calibration.",
    )

    @property
    def chooses_micro_batch_sizes(self) -> bool:
        """Tell whether micro-batch sizes are to be chosen, or were."""
        return self.micro_batch_size == "auto"

    @property
    def num_sizes(self) -> int:
        """Count the sizes that a sound ramp has."""
        # Counted and not listed: this is asked of ramps before anything has bounded them for a listing.
        if self.steps is not None:
            return len(self.steps)
        if self.start is None or self.increment is None or self.final is None:
            return 1
        return (self.final - self.start) // self.increment + 1

    def schedule(self) -> GlobalBatchSchedule:
        """Return the ramp in whichever form it has; the rules have found it sound."""
        if self.steps is not None:
            return StepRamp(self.steps)
        # The assertions tell the type checker what ramp_has_one_form has made sure of.
        assert self.final is not None
        if self.start is None:
            return StepRamp(((0, self.final),))  # A constant batch is a ramp of one step.
        assert self.increment is not None
        sizes = {"start": self.start, "increment": self.increment, "final": self.final}
        if self.samples_per_increment is not None:
            return LinearRamp.per_increment(**sizes, samples_per_increment=self.samples_per_increment)
        assert self.ramp_samples is not None
        return LinearRamp(**sizes, ramp_samples=self.ramp_samples)

    def ramp(self, micro_batch_size: int, data_parallel_size: int) -> BatchRampup:
        """Return the ramp on a layout, with its micro-batch sizes.

        Args:
            micro_batch_size: holds below the first listed size, and everywhere where "auto" has not chosen yet.
        """
        # A rule refuses both: sizes that are chosen and sizes that are listed exclude each other.
        steps = self.chosen_micro_batch_sizes or self.micro_batch_size_steps
        return BatchRampup(self.schedule(), micro_batch_size, data_parallel_size, steps)


def ramp_has_one_form(batch_rampup: BatchRampupConfig) -> Iterator[Fault]:
    """Require one of the three forms, neither mixed with another nor half given."""
    given = batch_rampup.model_dump(exclude_none=True, include=SIZE_KEYS)
    # Exactly one length: BLOOM's number of samples, read as the other one, would make its ramp 116 times as long.
    length = given.keys() & {"ramp_samples", "samples_per_increment"}
    linear = given.keys() - length == {"start", "increment", "final"} and len(length) == 1
    if not linear and given.keys() not in ({"final"}, {"steps"}):
        yield Fault("megastable.batch_rampup", given, RAMP_FORMS)


def ramp_reaches_final(batch_rampup: BatchRampupConfig) -> Iterator[Fault]:
    """Require that a whole number of increments, from one to ``MOST_INCREMENTS``, leads from start to final."""
    start = batch_rampup.start
    increment = batch_rampup.increment
    final = batch_rampup.final
    if start is None or increment is None or final is None:
        return
    if start >= final:
        yield Fault(
            "megastable.batch_rampup.start",
            start,
            f"must be below final ({final}); for a constant batch give final alone",
        )
    elif (final - start) % increment:
        lower = start + (final - start) // increment * increment
        # start itself is no legal neighbour: a ramp that never rises is a constant batch, which has its own form.
        neighbours = f"{lower} or {lower + increment}" if lower > start else f"{lower + increment}"
        yield Fault(
            "megastable.batch_rampup.final",
            final,
            f"must be start ({start}) plus a multiple of increment ({increment}), such as {neighbours}",
        )
    # Only of a ramp that is sound otherwise: the increments of another one cannot be counted.
    elif (final - start) // increment > MOST_INCREMENTS:
        yield Fault(
            "megastable.batch_rampup.increment",
            increment,
            f"leads from start ({start}) to final ({final}) in {(final - start) // increment:,} increments; the most "
            f"are {MOST_INCREMENTS:,}",
        )


def ramp_steps_rise(batch_rampup: BatchRampupConfig) -> Iterator[Fault]:
    """Require that a list of steps begins at sample 0 and goes on in order, and that the batch never falls."""
    steps = batch_rampup.steps or ()
    # An empty list is a list: None, the other value that is false, means that the ramp has another form.
    if batch_rampup.steps == ():
        yield Fault("megastable.batch_rampup.steps", [], "must list at least one [from_sample, global_batch_size]")
    if steps and steps[0][0] != 0:
        yield Fault("megastable.batch_rampup.steps[0]", steps[0], "the first from_sample must be 0")
    for index, (before, step) in enumerate(pairwise(steps), start=1):
        path = f"megastable.batch_rampup.steps[{index}]"
        if step[0] <= before[0]:
            yield Fault(path, step, f"from_sample must be above the one before ({before[0]})")
        if step[1] < before[1]:
            yield Fault(path, step, f"global_batch_size must not be below the one before ({before[1]})")


def micro_batch_steps_rise(batch_rampup: BatchRampupConfig) -> Iterator[Fault]:
    """Require that the global batch sizes from which a micro-batch size holds are listed in order."""
    for key in ("micro_batch_size_steps", "chosen_micro_batch_sizes"):
        for index, (before, step) in enumerate(pairwise(getattr(batch_rampup, key)), start=1):
            if step[0] <= before[0]:
                yield Fault(
                    f"megastable.batch_rampup.{key}[{index}]",
                    step,
                    f"from_global_batch_size must be above the one before ({before[0]})",
                )


def auto_goes_by_a_calibration(batch_rampup: BatchRampupConfig) -> Iterator[Fault]:
    """Require a calibration for "auto", and refuse its keys without it, where they would be ignored."""
    # Empty values ask for nothing, so only those that hold something are refused.
    given = batch_rampup.model_dump(include={"calibration", "chosen_micro_batch_sizes"})
    if batch_rampup.chooses_micro_batch_sizes:
        if batch_rampup.calibration is None:
            message = f'micro_batch_size "auto" needs {HOW_TO_CALIBRATE}, or the name of one of {", ".join(DEVICES)}'
            yield Fault("megastable.batch_rampup.calibration", None, message)
        return
    for key, value in given.items():
        if value:
            message = 'is only read with micro_batch_size "auto"; remove it, or set that'
            yield Fault(f"megastable.batch_rampup.{key}", value, message)


def auto_chooses_every_size(batch_rampup: BatchRampupConfig) -> Iterator[Fault]:
    """Refuse listed micro-batch sizes where "auto" chooses them."""
    if batch_rampup.chooses_micro_batch_sizes and batch_rampup.micro_batch_size_steps:
        yield Fault(
            "megastable.batch_rampup.micro_batch_size_steps",
            batch_rampup.micro_batch_size_steps,
            'micro_batch_size "auto" chooses every size; remove one of them',
        )


def auto_tries_few_splits(batch_rampup: BatchRampupConfig, pipeline: PipelineConfig) -> Iterator[Fault]:
    """Refuse to choose the sizes of so many batches on so many stages that a launch would wait for it."""
    tried = batch_rampup.num_sizes * pipeline.num_stages**2
    if batch_rampup.chooses_micro_batch_sizes and tried > MOST_TRIED_BY_AUTO:
        yield Fault(
            "megastable.batch_rampup.micro_batch_size",
            "auto",
            f"would simulate {batch_rampup.num_sizes:,} batches on {pipeline.num_stages} stages, for which batches x "
            f"stages^2 may be at most {MOST_TRIED_BY_AUTO:,}; take fewer increments, or null and "
            "micro_batch_size_steps",
        )
