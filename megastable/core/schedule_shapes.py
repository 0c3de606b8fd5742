"""The shapes of a pipeline's schedule: a registry, and for each the orders that are tried for given costs.

A shape says how many chunks a rank holds and which orders its passes may take. The fastest is chosen by playing all of
them, so a shape is never slower than what it contains: ``zb_h1`` contains 1F1B with every backward pass split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megastable.core.errors import UserError
from megastable.core.pipeline_schedule import Pass, PassKind, PipelineSchedule, Placement, StageCosts
from megastable.core.schedule_lists import MemoryLimit, Preference, list_schedule
from megastable.core.schedule_simulation import Held, Timeline, most_held, play

ROUNDING = 1e-9
"""Relative; schedules that differ by less take the same time, and the one that holds less is better."""

Orders = tuple[tuple[Pass, ...], ...]
"""Of every rank."""


@dataclass(frozen=True)
class Task:
    """What is to be scheduled.

    Attributes:
        costs: of all stages, as many as ranks times chunks.
        limit: of every rank.
    """

    placement: Placement
    costs: StageCosts
    num_microbatches: int
    limit: MemoryLimit


@dataclass(frozen=True)
class Shape:
    """A member of the registry.

    Attributes:
        num_chunks: of a rank.
        orders: yields the candidates, all within the limit.
    """

    num_chunks: int
    orders: Callable[[Task], Iterator[Orders]]


# Orders by rule


def one_forward_one_backward(task: Task) -> Iterator[Orders]:
    """Yield the order of 1F1B: Narayanan et al., arXiv 2104.04473, figure 4, with fewer in flight where memory asks."""
    yield tuple(
        tuple(_alternating(_in_flight(task, rank), task.num_microbatches)) for rank in range(task.placement.num_ranks)
    )


def _alternating(in_flight: int, num_microbatches: int) -> Iterator[Pass]:
    for micro_batch in range(in_flight):
        yield Pass(PassKind.FORWARD, 0, micro_batch)
    for micro_batch in range(num_microbatches):
        yield Pass(PassKind.BACKWARD, 0, micro_batch)
        if micro_batch + in_flight < num_microbatches:
            yield Pass(PassKind.FORWARD, 0, micro_batch + in_flight)


def _split_alternating(in_flight: int, deferred: int, num_microbatches: int) -> Iterator[Pass]:
    """Yield 1F1B's passes with second halves that come ``deferred`` micro-batches after the first."""
    for work in _alternating(in_flight, num_microbatches):
        if work.kind is PassKind.FORWARD:
            yield work
            continue
        yield work._replace(kind=PassKind.INPUT_BACKWARD)
        if work.micro_batch >= deferred:
            yield Pass(PassKind.WEIGHT_BACKWARD, 0, work.micro_batch - deferred)
    for micro_batch in range(max(0, num_microbatches - deferred), num_microbatches):
        yield Pass(PassKind.WEIGHT_BACKWARD, 0, micro_batch)


def _in_flight(task: Task, rank: int) -> int:
    """Return how many forward passes a rank runs before its first backward pass: what fills the ranks behind it."""
    return min(task.placement.num_ranks - rank, task.num_microbatches, task.limit.activations)


def zb_h1(task: Task) -> Iterator[Orders]:
    """Yield 1F1B with split passes, ZB-H1 (Qi et al., arXiv 2401.10241, section 2.2), and lists for one chunk."""
    for most_deferred in (0, task.limit.deferred - 1):
        yield tuple(
            # A rank defers as many as it is away from the first, which fills its wait at the end of the step.
            tuple(_split_alternating(_in_flight(task, rank), min(rank, most_deferred), task.num_microbatches))
            for rank in range(task.placement.num_ranks)
        )
    yield from listed(task)


# Orders by lists


def listed(task: Task) -> Iterator[Orders]:
    """Yield list schedules that differ in what is held and in how long second halves are put off."""
    num_ranks, num_chunks = task.placement.num_ranks, task.placement.num_chunks
    # No rank can hold more than all micro-batches. Where memory is plenty, running ahead may yet be slower.
    most = min(task.limit.activations, num_chunks * (task.num_microbatches + 1))
    held = {max(num_chunks, min(most, count)) for count in (num_chunks * num_ranks, 3 * num_ranks, most)}
    preferences = [Preference(keep_deferred=keep) for keep in (None, 0, 1, num_ranks)]
    if num_chunks > 1:
        preferences.append(Preference(share_by_stage=True))
    for activations in sorted(held):
        limit = MemoryLimit(activations, task.limit.deferred)
        for preference in preferences:
            yield list_schedule(task.placement, task.costs, task.num_microbatches, limit, preference)


SHAPES: dict[str, Shape] = {
    "1f1b": Shape(1, one_forward_one_backward),
    "zb_h1": Shape(1, zb_h1),
    "v": Shape(2, listed),
}


# The choice


def schedule_of(
    name: str, num_ranks: int, costs: StageCosts, num_microbatches: int, limit: MemoryLimit
) -> PipelineSchedule:
    """Compute the fastest schedule of a shape within the memory; of equally fast ones that which holds least.

    Args:
        name: a key of ``SHAPES``.
        costs: of as many stages as ranks times the shape's chunks.

    Raises:
        UserError: nothing of this shape fits the memory.
    """
    shape = SHAPES[name]
    placement = Placement(num_ranks, shape.num_chunks)
    if limit.activations < shape.num_chunks or limit.deferred < 1:
        raise UserError(
            f"a {name} schedule needs room for {shape.num_chunks} activations and 1 deferred gradient on every rank, "
            f"not {limit.activations} and {limit.deferred}"
        )
    task = Task(placement, costs, num_microbatches, limit)
    candidates = {orders: None for orders in shape.orders(task)}  # each once, in their order
    played = [play(PipelineSchedule(name, placement, num_microbatches, orders), costs) for orders in candidates]
    return _best(played).schedule


def fastest_schedule(
    num_ranks: int, chunk_costs: StageCosts, num_microbatches: int, chunk_limit: MemoryLimit
) -> PipelineSchedule:
    """Compute the fastest schedule of all shapes in the same memory.

    Args:
        chunk_costs: of two stages a rank; a rank of one chunk holds two neighbours of them.
        chunk_limit: counts chunks, so that what a rank of one chunk holds counts twice.

    Raises:
        UserError: nothing fits the memory.
    """
    played = []
    for name, shape in SHAPES.items():
        chunks_joined = 2 // shape.num_chunks
        costs = chunk_costs if chunks_joined == 1 else chunk_costs.joined_in_pairs()
        limit = MemoryLimit(chunk_limit.activations // chunks_joined, max(1, chunk_limit.deferred // chunks_joined))
        played.append(play(schedule_of(name, num_ranks, costs, num_microbatches, limit), costs))
    return _best(played).schedule


def _best(played: list[Timeline]) -> Timeline:
    least = min(timeline.step_seconds for timeline in played)
    near = [timeline for timeline in played if timeline.step_seconds <= least * (1 + ROUNDING)]
    return min(near, key=lambda timeline: sum(_chunks_held(timeline.schedule)))


def _chunks_held(schedule: PipelineSchedule) -> tuple[int, int]:
    """Return the most activations and deferred gradients of a rank, in halves of a rank's layers."""
    held: list[Held] = [most_held(order) for order in schedule.orders]
    halves = 2 // schedule.placement.num_chunks
    return halves * max(one.activations for one in held), halves * max(one.deferred for one in held)
