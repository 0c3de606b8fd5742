"""Every layout that so many devices allow for a run, ranked by the time to train."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from megastable.config import ConfigError, RunConfig, run_from_dict
from megastable.core.batch_rampup import RunLength
from megastable.planning.forecast import phase_speed
from megastable.planning.machine import Machine
from megastable.planning.memory import stage_memory
from megastable.planning.run_plan import RunPlan
from megastable.planning.step_time import step_cost

MICRO_BATCH_SIZES = (1, 2, 4, 8, 16)
START_FACTORS = (1, 2, 4)
"""Starts of the ramp that are tried, as multiples of the file's."""
SAME_SIZE_AT_EVERY_BATCH: dict[str, Any] = {
    "micro_batch_size_steps": (),
    "micro_batch_size": None,
    "calibration": None,
    "chosen_micro_batch_sizes": (),
}
"""The ramp's keys of the micro-batches where ``train_micro_batch_size_per_gpu`` alone says it."""
GIB = 2**30


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
    """All candidates for ``devices``: the feasible ones first, the fastest at the top.

    Every candidate trains on as many samples as the file's own ramp takes. The layout of the file plays no part. The
    micro-batch size is the same at every batch of the ramp.
    """
    run = _with_samples(file)
    batches = {start: _global_batch_sizes(run, start) for start in _ramp_starts(run)}
    found: list[Candidate] = []
    for candidates in _layouts(run, devices):
        refusal = _refusal(run, candidates[0])
        for candidate in candidates:
            reason = refusal or _indivisible(candidate, batches[candidate.ramp_start])
            found.append(replace(candidate, reason=reason) if reason else _judge(run, devices, machine, candidate))
    return sorted(found, key=_rank)


def _rank(candidate: Candidate) -> tuple[bool, float, float, tuple[int, ...]]:
    """Equally fast ones are ordered by memory, then by the simpler layout."""
    layout = (candidate.num_stages, candidate.tensor_parallel_size, candidate.micro_batch_size)
    return (
        candidate.reason is not None,
        candidate.seconds_to_train or 0.0,
        candidate.memory_gib or 0.0,
        (*layout, candidate.activation_checkpointing, candidate.ramp_start or 0),
    )


def _with_samples(file: RunConfig) -> RunConfig:
    """The run, for as many samples as it takes, whichever way its length is given."""
    training, ramp = file.megastable.training, file.megastable.batch_rampup.ramp(1, data_parallel_size=1)
    phases = ramp.phases(total_samples=training.total_samples, total_steps=training.total_steps)
    length = {"total_samples": RunLength.of(phases).total_samples, "total_steps": None, "world_size": None}
    changed = {"training": training.model_copy(update=length)}
    return file.model_copy(update={"megastable": file.megastable.model_copy(update=changed)})


def _layouts(run: RunConfig, devices: int) -> Iterator[list[Candidate]]:
    """For every way to share the devices among stages, replicas and tensor ranks: all that can be varied on it."""
    starts = _ramp_starts(run)
    for stages in _divisors(devices):
        for tensor in _divisors(devices // stages):
            replicas = devices // stages // tensor
            variants = product(MICRO_BATCH_SIZES, (False, True), starts)
            yield [Candidate(stages, replicas, tensor, *variant) for variant in variants]


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _ramp_starts(run: RunConfig) -> Sequence[int | None]:
    ramp = run.megastable.batch_rampup
    if ramp.start is None or ramp.increment is None or ramp.final is None:
        return [None]
    starts = [ramp.start * factor for factor in START_FACTORS]
    return [start for start in starts if start < ramp.final and (ramp.final - start) % ramp.increment == 0]


def _refusal(run: RunConfig, candidate: Candidate) -> str | None:
    """Why the rules of a run file refuse this layout of stages and tensor ranks, whatever its batches."""
    values = _run_of(run, candidate).model_dump(mode="json", by_alias=True, exclude_none=True)
    try:
        run_from_dict(values)
    except ConfigError as error:
        return str(error.faults[0])
    return None


def _global_batch_sizes(run: RunConfig, start: int | None) -> list[int]:
    """The sizes of a ramp from ``start`` on, in order; one replica takes them all in micro-batches of one sample."""
    ramp = _run_of(run, Candidate(1, 1, 1, 1, False, start)).megastable.batch_rampup.ramp(1, data_parallel_size=1)
    phases = ramp.phases(total_samples=run.megastable.training.total_samples)
    return [phase.batch.global_batch_size for phase in phases]


def _indivisible(candidate: Candidate, sizes: Sequence[int]) -> str | None:
    """The first batch that replicas and micro-batches do not divide."""
    unit = candidate.micro_batch_size * candidate.data_parallel_size
    for size in sizes:
        if size % unit:
            return (
                f"global batch {size} is not a multiple of micro-batch size {candidate.micro_batch_size} x "
                f"data-parallel size {candidate.data_parallel_size} = {unit}"
            )
    return None


def _judge(run: RunConfig, devices: int, machine: Machine, candidate: Candidate) -> Candidate:
    own = RunPlan.of(_run_of(run, candidate), devices)
    memory = stage_memory(own, machine.on_cpu)
    fullest = max(range(len(memory)), key=lambda stage: memory[stage].total)
    needed, usable = memory[fullest].total, machine.device.usable_bytes
    weighed = replace(candidate, memory_gib=needed / GIB)
    if needed > usable:
        reason = f"stage {fullest} needs {needed / GIB:.1f} GiB, {usable / GIB:.1f} are usable"
        return replace(weighed, reason=reason)
    cost = step_cost(own, machine)
    seconds = sum(phase.num_steps * phase_speed(own, phase, cost).step_seconds for phase in own.phases)
    return replace(weighed, seconds_to_train=seconds)


def _run_of(run: RunConfig, candidate: Candidate) -> RunConfig:
    """The run file as it would be for a candidate. Not checked: the fields are as the schema wants them."""
    settings = run.megastable
    tensor = settings.tensor_parallel
    sliced = tensor.sequence_parallel and candidate.tensor_parallel_size > 1
    ramp: dict[str, Any] = dict(SAME_SIZE_AT_EVERY_BATCH)
    if candidate.ramp_start is not None:
        ramp["start"] = candidate.ramp_start
    changed = {
        "pipeline": settings.pipeline.model_copy(
            update={
                "num_stages": candidate.num_stages,
                "partition": "balanced",  # a list of the file is for its own number of stages
                "activation_checkpointing": candidate.activation_checkpointing,
            }
        ),
        "tensor_parallel": tensor.model_copy(
            update={"size": candidate.tensor_parallel_size, "sequence_parallel": sliced}
        ),
        "batch_rampup": settings.batch_rampup.model_copy(update=ramp),
    }
    return run.model_copy(
        update={
            "train_micro_batch_size_per_gpu": candidate.micro_batch_size,
            "megastable": settings.model_copy(update=changed),
        }
    )
