"""Every layout that so many devices allow for a run, ranked by the time to train."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from megastable.config import ConfigError, RunConfig, run_from_dict
from megastable.core.batch_rampup import RunLength
from megastable.core.errors import UserError
from megastable.core.layout import divisors
from megastable.core.memory import GIB
from megastable.planning.data_sheet_cost import Machine, step_cost
from megastable.planning.forecast import phase_speed
from megastable.planning.memory import stage_memory
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


def search_layouts(file: RunConfig, devices: int, machine: Machine) -> list[Candidate]:
    """Find all candidates for ``devices``: the feasible ones first, the fastest at the top.

    Every candidate trains on as many samples as the file's own ramp takes. The layout of the file plays no part. The
    micro-batch size is the same at every batch of the ramp.
    """
    run = _with_samples(file)
    batches = {start: _global_batch_sizes(run, start) for start in _ramp_starts(run)}
    found: list[Candidate] = []
    for candidates in _layouts(run, devices):
        # The rules of a run file take longer than all else here, and these candidates differ in nothing that they
        # judge.
        refusal = _refusal(run, candidates[0])
        for candidate in candidates:
            reason = refusal or _indivisible(candidate, batches[candidate.ramp_start])
            if reason:
                found.append(replace(candidate, reason=reason))
            else:
                found.append(_judge(run, devices, machine, candidate))
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
    return file.model_copy(update={"megastable": file.megastable.model_copy(update=changed)})


def _ramp_starts(run: RunConfig) -> Sequence[int | None]:
    """List the starts to try: multiples of the file's from which its increment still leads to its final size."""
    ramp = run.megastable.batch_rampup
    if ramp.start is None or ramp.increment is None or ramp.final is None:
        return [None]
    starts = [ramp.start * factor for factor in START_FACTORS]
    return [start for start in starts if start < ramp.final and (ramp.final - start) % ramp.increment == 0]


def _global_batch_sizes(run: RunConfig, start: int | None) -> list[int]:
    """List the sizes of a ramp from ``start`` on, in order."""
    # A single replica takes every size in micro-batches of one sample, so that no size is refused here.
    smallest = Candidate(1, 1, 1, 1, activation_checkpointing=False, ramp_start=start)
    ramp = _run_of(run, smallest).megastable.batch_rampup.ramp(1, data_parallel_size=1)
    phases = ramp.phases(total_samples=run.megastable.training.total_samples)
    return [phase.batch.global_batch_size for phase in phases]


def _layouts(run: RunConfig, devices: int) -> Iterator[list[Candidate]]:
    """List all that can be varied, for every way to share the devices among stages, replicas and tensor ranks.

    Raises:
        UserError: the devices can be shared in too many ways to try them all.
    """
    starts = _ramp_starts(run)
    num_ways = sum(len(divisors(devices // stages)) for stages in divisors(devices))
    if num_ways > MOST_WAYS:
        raise UserError(
            f"--search: {devices:,} devices can be shared among stages, replicas and tensor ranks in {num_ways:,} "
            f"ways, and at most {MOST_WAYS} are tried; ask for a number of devices with fewer divisors"
        )
    # Stages and tensor ranks of a replica must divide the devices; replicas take what is left.
    for stages in divisors(devices):
        for tensor in divisors(devices // stages):
            replicas = devices // stages // tensor
            variants = product(MICRO_BATCH_SIZES, (False, True), starts)
            yield [Candidate(stages, replicas, tensor, *variant) for variant in variants]


def _refusal(run: RunConfig, candidate: Candidate) -> str | None:
    """Say why the rules of a run file refuse this layout of stages and tensor ranks, whatever its batches."""
    # Through plain values, as from a user's file: a copy of the model would skip the rules.
    values = _run_of(run, candidate).model_dump(mode="json", by_alias=True, exclude_none=True)
    try:
        run_from_dict(values)
    except ConfigError as error:
        return str(error.faults[0])
    return None


def _indivisible(candidate: Candidate, sizes: Sequence[int]) -> str | None:
    """Name the first batch that replicas and micro-batches do not divide."""
    unit = candidate.micro_batch_size * candidate.data_parallel_size
    for size in sizes:
        if size % unit:
            return (
                f"global batch {size} is not a multiple of micro-batch size {candidate.micro_batch_size} x "
                f"data-parallel size {candidate.data_parallel_size} = {unit}"
            )
    return None


def _judge(run: RunConfig, devices: int, machine: Machine, candidate: Candidate) -> Candidate:
    """Fill in the memory of a legal candidate, and its time, or that it does not fit."""
    plan = RunPlan.of(_run_of(run, candidate), devices)
    # Memory first: it is cheaper than playing every phase of a ramp, and rules out many candidates.
    totals = [use.total for use in stage_memory(plan, machine.on_cpu)]
    needed = max(totals)
    usable = machine.device.usable_bytes
    weighed = replace(candidate, memory_gib=needed / GIB)
    if needed > usable:
        stage = totals.index(needed)
        reason = f"stage {stage} needs {needed / GIB:.1f} GiB, {usable / GIB:.1f} are usable"
        return replace(weighed, reason=reason)
    cost = step_cost(plan, machine)
    seconds = sum(phase.num_steps * phase_speed(plan, phase, cost).step_seconds for phase in plan.phases)
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
    pipeline = {
        "num_stages": candidate.num_stages,
        # A list of blocks in the file is for its own number of stages.
        "partition": "balanced",
        "activation_checkpointing": candidate.activation_checkpointing,
    }
    tensor_parallel = {
        "size": candidate.tensor_parallel_size,
        # The rules refuse sequence parallelism without ranks to share the sequence.
        "sequence_parallel": settings.tensor_parallel.sequence_parallel and candidate.tensor_parallel_size > 1,
    }
    ramp = dict(SAME_SIZE_AT_EVERY_BATCH)
    if candidate.ramp_start is not None:
        ramp["start"] = candidate.ramp_start
    changed = {
        "pipeline": settings.pipeline.model_copy(update=pipeline),
        "tensor_parallel": settings.tensor_parallel.model_copy(update=tensor_parallel),
        "batch_rampup": settings.batch_rampup.model_copy(update=ramp),
    }
    return run.model_copy(
        update={
            "train_micro_batch_size_per_gpu": candidate.micro_batch_size,
            "megastable": settings.model_copy(update=changed),
        }
    )
