"""Plays a pipeline's schedule in a model of its costs: when every pass starts and ends, and what is held meanwhile."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from megastable.core.pipeline_schedule import Pass, PassKind, PipelineSchedule, StageCosts


class PlayedPass(NamedTuple):
    """A pass with its time since the start of the step."""

    rank: int
    work: Pass
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A step that was played.

    Attributes:
        passes: of all ranks, each behind all that it waited for.
    """

    schedule: PipelineSchedule
    passes: tuple[PlayedPass, ...]

    @cached_property
    def step_seconds(self) -> float:
        """Return the time from the first pass to the last, in the unit of the costs."""
        return max(played.end for played in self.passes)

    @cached_property
    def idle_share(self) -> float:
        """Compute the share of the step in which a rank waits, on average over the ranks."""
        busy = sum(played.end - played.start for played in self.passes)
        return 1 - busy / (self.step_seconds * self.schedule.placement.num_ranks)

    @cached_property
    def by_rank(self) -> tuple[tuple[PlayedPass, ...], ...]:
        """Return the passes of every rank, in its order."""
        rows: list[list[PlayedPass]] = [[] for _ in self.schedule.orders]
        for played in self.passes:
            rows[played.rank].append(played)
        return tuple(map(tuple, rows))


def play(schedule: PipelineSchedule, costs: StageCosts) -> Timeline:
    """Play a step: every rank runs its passes in their order, each as soon as its input has arrived.

    Raises:
        ValueError: the costs are of another number of stages, or the ranks wait for each other.
    """
    placement = schedule.placement
    if len(costs.forward) != placement.num_stages:
        raise ValueError(f"costs of {len(costs.forward)} stages for a schedule of {placement.num_stages}")
    done: list[PlayedPass] = []
    now = [0.0] * placement.num_ranks
    position = [0] * placement.num_ranks
    ended: dict[tuple[bool, int, int], float] = {}  # by (is a forward pass, stage, micro-batch)
    waiting: dict[tuple[bool, int, int], int] = {}  # what a rank waits for -> the rank
    runnable = list(range(placement.num_ranks))
    seconds = costs.seconds
    last = placement.num_stages - 1
    while runnable:
        rank = runnable.pop()
        order = schedule.orders[rank]
        while position[rank] < len(order):
            work = order[position[rank]]
            kind, chunk, micro_batch = work
            stage = placement.stage(rank, chunk)
            start = now[rank]
            needed = _needed(kind, stage, micro_batch, last)
            if needed is not None:
                if needed not in ended:
                    waiting[needed] = rank
                    break
                arrived = ended[needed]
                if placement.rank(needed[1]) != rank:
                    arrived += costs.transfer
                start = max(start, arrived)
            end = start + seconds[kind][stage]
            done.append(PlayedPass(rank, work, start, end))
            now[rank] = end
            position[rank] += 1
            if kind is not PassKind.WEIGHT_BACKWARD:
                result = (kind is PassKind.FORWARD, stage, micro_batch)
                ended[result] = end
                if result in waiting:
                    runnable.append(waiting.pop(result))
    if any(position[rank] < len(order) for rank, order in enumerate(schedule.orders)):
        raise ValueError(f"{schedule.shape}: the ranks wait for each other")
    return Timeline(schedule, tuple(done))


def _needed(kind: PassKind, stage: int, micro_batch: int, last: int) -> tuple[bool, int, int] | None:
    """Return whose result a pass needs; a gradient also shows that the stage's own forward pass is done."""
    if kind is PassKind.FORWARD:
        return (True, stage - 1, micro_batch) if stage > 0 else None
    if kind is PassKind.WEIGHT_BACKWARD:
        return (False, stage, micro_batch)
    return (False, stage + 1, micro_batch) if stage < last else (True, stage, micro_batch)


@dataclass(frozen=True)
class Held:
    """What a rank holds for micro-batches that are under way, each counted once a chunk.

    Attributes:
        activations: from the start of a forward pass to the end of the backward pass, or of its first half.
        deferred: from then to the end of the second half.
    """

    activations: int
    deferred: int


def most_held(order: tuple[Pass, ...]) -> Held:
    """Count the most that a rank holds at a time; this depends on its order alone, not on times."""
    activations = deferred = most_activations = most_deferred = 0
    for work in order:
        if work.kind is PassKind.FORWARD:
            activations += 1
        elif work.kind is PassKind.WEIGHT_BACKWARD:
            deferred -= 1
        else:
            activations -= 1
            deferred += work.kind is PassKind.INPUT_BACKWARD
        most_activations = max(most_activations, activations)
        most_deferred = max(most_deferred, deferred)
    return Held(most_activations, most_deferred)
