"""Every layout that so many devices allow for a run, ranked by the time to train."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import groupby, product
from typing import Any

from megastable.config import RunConfig
from megastable.config.reading.checking import faults_of_change
from megastable.core.batch_rampup import Batch, RampPhase, RunLength
from megastable.core.errors import UserError
from megastable.core.layout import divisors
from megastable.core.memory import GIB
from megastable.core.pipeline_cost import PipelineCost
from megastable.planning.data_sheet_cost import Machine, step_cost
from megastable.planning.memory import fullest_stage
from megastable.planning.run_plan import RunPlan

MOST_WAYS = 500
"""Ways to share devices that are tried, in a quarter of a second; 384 devices have 108, 100,000 have 441."""
MOST_PASSES = 1_500_000
"""Passes of a pipeline that are played to time what fits: about a second. BLOOM-176B takes 330,000 on 384 A100."""
MICRO_BATCH_SIZES = (1, 2, 4, 8, 16)
START_FACTORS = (1, 2, 4)
"""Starts of the ramp that are tried, as multiples of the file's."""
# With a size for every batch there would be too many candidates to try them all.
SAME_SIZE_AT_EVERY_BATCH: dict[str, Any] = {
    "micro_batch_size_steps": (),
    "micro_batch_size": None,
    "calibration": None,
    "chosen_micro_batch_sizes": (),
}
"""The ramp's keys of the micro-batches where ``train_micro_batch_size_per_gpu`` alone says it."""


Ramps = Mapping[int | None, Sequence[RampPhase]]
"""Start of the ramp -> its phases, in micro-batches of one sample on one replica."""


@dataclass(frozen=True)
class Candidate:
    """One layout, with what it would take, or the reason why it cannot be."""

    num_stages: int
    data_parallel_size: int
    tensor_parallel_size: int
    micro_batch_size: int
    activation_checkpointing: bool
    ramp_start: int | None
    """None where the file's ramp has no start that could be moved."""
    seconds_to_train: float | None = None
    memory_gib: float | None = None
    """Of the fullest stage's device."""
    reason: str | None = None
    """Why it is not feasible; None where it is."""

    @property
    def samples_at_once(self) -> int:
        """Return the samples of one micro-batch on every replica, of which a global batch is a multiple."""
        return self.micro_batch_size * self.data_parallel_size

    def num_microbatches(self, phases: Sequence[RampPhase]) -> list[int]:
        """Return the number of micro-batches of every phase, whose batches divide."""
        return [phase.batch.global_batch_size // self.samples_at_once for phase in phases]

    def batch(self, num_microbatches: int) -> Batch:
        """Return the batch of so many micro-batches."""
        return Batch(num_microbatches * self.samples_at_once, self.micro_batch_size, num_microbatches)


def search_layouts(file: RunConfig, devices: int, machine: Machine) -> list[Candidate]:
    """Find all candidates for ``devices``: the feasible ones first, the fastest at the top.

    Every candidate trains on as many samples as the file's own ramp takes. The layout of the file plays no part. The
    micro-batch size is the same at every batch of the ramp.
    """
    run = _with_samples(file)
    ramps = {start: _phases(run, start) for start in _ramp_starts(run)}
    legal: list[Candidate] = []
    found: list[Candidate] = []
    for candidate, refusal in _all_candidates(run, devices, ramps):
        reason = refusal or _indivisible(candidate, ramps[candidate.ramp_start])
        if reason is None:
            legal.append(candidate)
        else:
            found.append(replace(candidate, reason=reason))
    # What differs in its batches alone has the same cut, weights and passes, which are computed once.
    num_passes = 0
    for _, same_layout in groupby(legal, key=_without_batches):
        alike = list(same_layout)
        plan = RunPlan.of(_run_of(run, alike[0]), devices)
        weighed = _weigh(plan, machine, alike, ramps)
        fitting = [candidate for candidate in weighed if candidate.reason is None]
        num_passes += _num_passes(fitting, ramps)
        _check_passes(num_passes, devices)
        found += [candidate for candidate in weighed if candidate.reason is not None]
        found += _time(step_cost(plan, machine), fitting, ramps)
    return sorted(found, key=_rank)


def _with_samples(file: RunConfig) -> RunConfig:
    """Return the run for as many samples as it takes, whichever way its length is given.

    A number of steps would be more samples under a larger start of the ramp, so that candidates could not be compared.
    """
    training = file.megastable.training
    ramp = file.megastable.batch_rampup.ramp(1, data_parallel_size=1)
    phases = ramp.phases(total_samples=training.total_samples, total_steps=training.total_steps)
    length = {"total_samples": RunLength.of(phases).total_samples, "total_steps": None, "world_size": None}
    changed = {"training": training.model_copy(update=length)}
    run = file.model_copy(update={"megastable": file.megastable.model_copy(update=changed)})
    # Sound in itself: its own layout, which is of no interest here, gives way to one that every model has.
    return _run_of(run, Candidate(1, 1, 1, 1, activation_checkpointing=False, ramp_start=None))


def _ramp_starts(run: RunConfig) -> Sequence[int | None]:
    """List the starts to try: multiples of the file's from which its increment still leads to its final size."""
    ramp = run.megastable.batch_rampup
    if ramp.start is None or ramp.increment is None or ramp.final is None:
        return [None]
    starts = [ramp.start * factor for factor in START_FACTORS]
    return [start for start in starts if start < ramp.final and (ramp.final - start) % ramp.increment == 0]


def _phases(run: RunConfig, start: int | None) -> list[RampPhase]:
    """Expand a ramp from ``start`` on, in micro-batches of one sample on one replica, which divide every size."""
    smallest = Candidate(1, 1, 1, 1, activation_checkpointing=False, ramp_start=start)
    ramp = _run_of(run, smallest).megastable.batch_rampup.ramp(1, data_parallel_size=1)
    return ramp.phases(total_samples=run.megastable.training.total_samples)


def _all_candidates(
    run: RunConfig, devices: int, ramps: Iterable[int | None]
) -> Iterator[tuple[Candidate, str | None]]:
    """Yield all that can be varied, with the reason why the rules refuse it; None where they do not.

    Raises:
        UserError: the devices can be shared in too many ways to try them all.
    """
    # Stages and tensor ranks of a replica must divide the devices; replicas take what is left.
    ways = [(stages, tensor) for stages in divisors(devices) for tensor in divisors(devices // stages)]
    if len(ways) > MOST_WAYS:
        raise UserError(
            f"--search: {devices:,} devices can be shared among stages, replicas and tensor ranks in {len(ways):,} "
            f"ways, and at most {MOST_WAYS} are tried; ask for a number of devices with fewer divisors"
        )
    for stages, tensor in ways:
        replicas = devices // stages // tensor
        refusal = _refusal(run, stages, tensor)
        for checkpointing, size, start in product((False, True), MICRO_BATCH_SIZES, ramps):
            yield Candidate(stages, replicas, tensor, size, checkpointing, start), refusal


def _without_batches(candidate: Candidate) -> tuple[int, int, int, bool]:
    return (
        candidate.num_stages,
        candidate.data_parallel_size,
        candidate.tensor_parallel_size,
        candidate.activation_checkpointing,
    )


def _refusal(run: RunConfig, stages: int, tensor: int) -> str | None:
    """Say why the rules of a run file refuse this layout of stages and tensor ranks, whatever its batches."""
    candidate = Candidate(stages, 1, tensor, 1, activation_checkpointing=False, ramp_start=None)
    faults = faults_of_change(run, _layout_keys(run, candidate))
    return str(faults[0]) if faults else None


def _weigh(plan: RunPlan, machine: Machine, alike: Sequence[Candidate], ramps: Ramps) -> list[Candidate]:
    """Fill in the memory of legal candidates that differ in their batches alone, and why they do not fit."""
    usable = machine.device.usable_bytes
    # All starts of a ramp lead to the same batches.
    fullest = cache(partial(fullest_stage, plan, machine.on_cpu))
    weighed = []
    for candidate in alike:
        # Memory grows with the micro-batches.
        most = max(candidate.num_microbatches(ramps[candidate.ramp_start]))
        stage, needed = fullest(candidate.batch(most))
        reason = None
        if needed > usable:
            reason = f"stage {stage} needs {needed / GIB:.1f} GiB, {usable / GIB:.1f} are usable"
        weighed.append(replace(candidate, memory_gib=needed / GIB, reason=reason))
    return weighed


def _num_passes(alike: Sequence[Candidate], ramps: Ramps) -> int:
    """Count roughly the passes that are played to time the candidates, which differ in their batches alone."""
    num_passes = 0
    counts: set[tuple[int, int]] = set()
    for candidate in alike:
        stages = candidate.num_stages
        phases = ramps[candidate.ramp_start]
        num_passes += len(phases)
        # A longer step is extrapolated.
        counts.update((stages, min(count, stages + 1)) for count in candidate.num_microbatches(phases))
    return num_passes + sum(stages * (stages + count) for stages, count in counts if stages > 1)


def _check_passes(num_passes: int, devices: int) -> None:
    """Check that the search ends soon.

    Raises:
        UserError: too many passes would be played.
    """
    if num_passes > MOST_PASSES:
        raise UserError(
            f"--search: so many layouts of {devices:,} devices fit, with so many batches each, that more than "
            f"{MOST_PASSES:,} passes would be played to time them; ask for a number of devices with fewer divisors, or "
            "for fewer batches: a larger megastable.batch_rampup.increment, or a shorter list of steps"
        )


def _time(cost: PipelineCost, alike: Sequence[Candidate], ramps: Ramps) -> Iterator[Candidate]:
    """Fill in the time to train of candidates that fit and differ in their batches alone."""
    for candidate in alike:
        phases = ramps[candidate.ramp_start]
        seconds = 0.0
        for phase, count in zip(phases, candidate.num_microbatches(phases), strict=True):
            seconds += phase.num_steps * cost.step_seconds(candidate.micro_batch_size, count)
        yield replace(candidate, seconds_to_train=seconds)


def _indivisible(candidate: Candidate, phases: Sequence[RampPhase]) -> str | None:
    """Name the first batch that replicas and micro-batches do not divide."""
    unit = candidate.samples_at_once
    for phase in phases:
        size = phase.batch.global_batch_size
        if size % unit:
            return (
                f"global batch {size} is not a multiple of micro-batch size {candidate.micro_batch_size} x "
                f"data-parallel size {candidate.data_parallel_size} = {unit}"
            )
    return None


def _rank(candidate: Candidate) -> tuple[bool, float, float, tuple[int, ...]]:
    """Return the key that sorts by time, equally fast ones by memory, then by the simpler layout."""
    layout = (candidate.num_stages, candidate.tensor_parallel_size, candidate.micro_batch_size)
    return (
        candidate.reason is not None,
        candidate.seconds_to_train or 0.0,
        candidate.memory_gib or 0.0,
        (*layout, candidate.activation_checkpointing, candidate.ramp_start or 0),
    )


def _run_of(run: RunConfig, candidate: Candidate) -> RunConfig:
    """Return the run file as it would be for a candidate; the fields are legal, and no rule is checked."""
    settings = run.megastable
    ramp = dict(SAME_SIZE_AT_EVERY_BATCH)
    if candidate.ramp_start is not None:
        ramp["start"] = candidate.ramp_start
    changed: dict[str, Any] = {"batch_rampup": settings.batch_rampup.model_copy(update=ramp)}
    for name, values in _layout_keys(run, candidate).items():
        changed[name] = getattr(settings, name).model_copy(update=values)
    return run.model_copy(
        update={
            "train_micro_batch_size_per_gpu": candidate.micro_batch_size,
            "megastable": settings.model_copy(update=changed),
        }
    )


def _layout_keys(run: RunConfig, candidate: Candidate) -> dict[str, dict[str, Any]]:
    """Return the keys of the sections that say how a candidate is laid out."""
    return {
        "pipeline": {
            "num_stages": candidate.num_stages,
            # A list of blocks in the file is for its own number of stages.
            "partition": "balanced",
            "activation_checkpointing": candidate.activation_checkpointing,
        },
        "tensor_parallel": {
            "size": candidate.tensor_parallel_size,
            # The rules refuse sequence parallelism without ranks to share the sequence.
            "sequence_parallel": run.megastable.tensor_parallel.sequence_parallel
            and candidate.tensor_parallel_size > 1,
        },
    }
