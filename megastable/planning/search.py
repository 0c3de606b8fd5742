"""Every layout that so many devices allow for a run, ranked by the time to train."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from megastable.config import RunConfig
from megastable.config.reading.checking import faults_of_change
from megastable.core.batch_rampup import Batch, RampPhase, RunLength
from megastable.core.errors import UserError
from megastable.core.layout import ParallelLayout, divisors
from megastable.core.memory import GIB
from megastable.core.pipeline_cost import PipelineCost
from megastable.planning.data_sheet_cost import Machine, step_cost
from megastable.planning.memory import fullest_stage
from megastable.planning.run_plan import RunPlan

MOST_WAYS = 500
"""Ways to share devices that are tried; 384 devices have 108, and take two seconds."""
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


def search_layouts(file: RunConfig, devices: int, machine: Machine) -> list[Candidate]:
    """Find all candidates for ``devices``: the feasible ones first, the fastest at the top.

    Every candidate trains on as many samples as the file's own ramp takes. The layout of the file plays no part. The
    micro-batch size is the same at every batch of the ramp.
    """
    run = _with_samples(file)
    ramps = {start: _phases(run, start) for start in _ramp_starts(run)}
    found: list[Candidate] = []
    for layout in _layouts(devices):
        sizes = (layout.num_stages, layout.data_parallel_size, layout.tensor_parallel_size)
        refusal = _refusal(run, layout)
        for activation_checkpointing in (False, True):
            candidates = [
                Candidate(*sizes, micro_batch_size, activation_checkpointing, start)
                for micro_batch_size, start in product(MICRO_BATCH_SIZES, ramps)
            ]
            if refusal is None:
                found += _judge(run, machine, layout, candidates, ramps)
            else:
                found += [replace(candidate, reason=refusal) for candidate in candidates]
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


def _layouts(devices: int) -> list[ParallelLayout]:
    """List every way to share the devices among stages, replicas and tensor ranks.

    Raises:
        UserError: there are too many to try them all.
    """
    # Stages and tensor ranks of a replica must divide the devices; replicas take what is left.
    layouts = [
        ParallelLayout.of_world(devices, stages, tensor)
        for stages in divisors(devices)
        for tensor in divisors(devices // stages)
    ]
    if len(layouts) > MOST_WAYS:
        raise UserError(
            f"--search: {devices:,} devices can be shared among stages, replicas and tensor ranks in {len(layouts):,} "
            f"ways, and at most {MOST_WAYS} are tried; ask for a number of devices with fewer divisors"
        )
    return layouts


def _refusal(run: RunConfig, layout: ParallelLayout) -> str | None:
    """Say why the rules of a run file refuse this layout of stages and tensor ranks, whatever its batches."""
    candidate = Candidate(
        layout.num_stages, 1, layout.tensor_parallel_size, 1, activation_checkpointing=False, ramp_start=None
    )
    faults = faults_of_change(run, _layout_keys(run, candidate))
    return str(faults[0]) if faults else None


def _judge(
    run: RunConfig,
    machine: Machine,
    layout: ParallelLayout,
    candidates: Sequence[Candidate],
    ramps: Mapping[int | None, Sequence[RampPhase]],
) -> Iterator[Candidate]:
    """Fill in the memory and time of candidates that differ in their batches alone, or why they cannot be."""
    plan: RunPlan | None = None
    for candidate in candidates:
        phases = ramps[candidate.ramp_start]
        reason = _indivisible(candidate, phases)
        if reason is not None:
            yield replace(candidate, reason=reason)
            continue
        if plan is None:
            # Of the first that divides, for all: cut, weights and the time of a sample are the same.
            plan = RunPlan.of(_run_of(run, candidate), layout.world_size)
            cost = step_cost(plan, machine)
        yield _weighed_and_timed(plan, cost, machine, candidate, phases)


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


def _weighed_and_timed(
    plan: RunPlan, cost: PipelineCost, machine: Machine, candidate: Candidate, phases: Sequence[RampPhase]
) -> Candidate:
    """Fill in the memory of a candidate whose batches divide, and its time, or that it does not fit."""
    micro_batch_size = candidate.micro_batch_size
    num_microbatches = [phase.batch.global_batch_size // candidate.samples_at_once for phase in phases]
    # Memory first: it is cheaper than playing every phase of a ramp. It grows with the micro-batches.
    most = max(num_microbatches)
    largest = Batch(most * candidate.samples_at_once, micro_batch_size, most)
    stage, needed = fullest_stage(plan, machine.on_cpu, largest)
    usable = machine.device.usable_bytes
    weighed = replace(candidate, memory_gib=needed / GIB)
    if needed > usable:
        reason = f"stage {stage} needs {needed / GIB:.1f} GiB, {usable / GIB:.1f} are usable"
        return replace(weighed, reason=reason)
    seconds = sum(
        phase.num_steps * cost.step_seconds(micro_batch_size, count)
        for phase, count in zip(phases, num_microbatches, strict=True)
    )
    return replace(weighed, seconds_to_train=seconds)


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
