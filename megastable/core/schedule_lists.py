"""List scheduling: whenever a rank is free, it starts the pass that matters most of those whose input is there."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from megastable.core.pipeline_schedule import Pass, PassKind, Placement, StageCosts


@dataclass(frozen=True)
class MemoryLimit:
    """What a rank may hold at a time, see ``schedule_simulation.Held``.

    Attributes:
        activations: at least one for each chunk.
        deferred: at least one.
    """

    activations: int
    deferred: int


@dataclass(frozen=True)
class Preference:
    """What a rank prefers among passes that can start; gradients come first, since others wait for them.

    Attributes:
        share_by_stage: the activations of a rank are shared among its chunks by how long each is held, which is the
            longer the further the stage is from the loss; without it the first chunk may take all but one.
        keep_deferred: second halves are run before a forward pass while more than so many are held.
    """

    share_by_stage: bool = False
    keep_deferred: int | None = None


@dataclass
class _Stage:
    """How far a stage is; micro-batches pass in order, so that the arrivals are a queue.

    Attributes:
        room: a forward pass starts only while the rank holds fewer activations.
        share: and while the stage holds fewer.
    """

    chunk: int
    room: int
    share: int
    forward_arrivals: list[float] = field(default_factory=list)
    gradient_arrivals: list[float] = field(default_factory=list)
    forwards: int = 0
    gradients: int = 0
    weights: int = 0


def list_schedule(
    placement: Placement, costs: StageCosts, num_microbatches: int, limit: MemoryLimit, preference: Preference
) -> tuple[tuple[Pass, ...], ...]:
    """Compute the order of every rank's passes, with split backward passes."""
    return _Lists(placement, costs, num_microbatches, limit, preference).run()


class _Lists:
    """The state while a step is scheduled."""

    def __init__(
        self, placement: Placement, costs: StageCosts, num_microbatches: int, limit: MemoryLimit, preference: Preference
    ) -> None:
        if limit.activations < placement.num_chunks or limit.deferred < 1:
            raise ValueError(f"{limit}: a rank holds an activation for each chunk and one deferred gradient at least")
        self.placement = placement
        self.costs = costs
        self.limit = limit
        self.preference = preference
        # [chunk] of every rank.
        self.stages = [
            [self._stage(rank, chunk) for chunk in range(placement.num_chunks)] for rank in range(placement.num_ranks)
        ]
        self.stages[0][0].forward_arrivals = [0.0] * num_microbatches
        self.orders: list[list[Pass]] = [[] for _ in range(placement.num_ranks)]
        self.free_at = [0.0] * placement.num_ranks
        self.wakes = [(0.0, rank) for rank in range(placement.num_ranks)]

    def _stage(self, rank: int, chunk: int) -> _Stage:
        # A place is left for every later chunk, so that micro-batches that have begun can always be ended.
        room = self.limit.activations - (self.placement.num_chunks - 1 - chunk)
        share = room
        if self.preference.share_by_stage:
            num_stages = self.placement.num_stages
            stages_to_loss = num_stages - self.placement.stage(rank, chunk)
            share = max(1, self.limit.activations * stages_to_loss // (num_stages + 1))
        return _Stage(chunk, room, share)

    def run(self) -> tuple[tuple[Pass, ...], ...]:
        """Schedule all passes, in the order of their starts."""
        while self.wakes:
            now, rank = heapq.heappop(self.wakes)
            if now < self.free_at[rank]:
                continue  # it is woken again when it is free
            chosen = self._choose(self.stages[rank], now)
            if chosen is not None:
                self._start(rank, *chosen, now)
        return tuple(map(tuple, self.orders))

    def _choose(self, stages: Sequence[_Stage], now: float) -> tuple[PassKind, _Stage] | None:
        activations = sum(stage.forwards - stage.gradients for stage in stages)
        deferred = sum(stage.gradients - stage.weights for stage in stages)
        if deferred < self.limit.deferred:
            # Those of the later chunk are what the earlier one's wait for.
            for stage in reversed(stages):
                if _has_arrived(stage.gradient_arrivals, stage.gradients, now):
                    return PassKind.INPUT_BACKWARD, stage
        keep = self.preference.keep_deferred
        if keep is None or deferred <= keep:
            # Of two forward passes, that of the chunk nearer to the loss.
            for stage in reversed(stages):
                has_room = activations < stage.room and stage.forwards - stage.gradients < stage.share
                if has_room and _has_arrived(stage.forward_arrivals, stage.forwards, now):
                    return PassKind.FORWARD, stage
        if deferred:
            # The chunk that has waited longest.
            return PassKind.WEIGHT_BACKWARD, max(stages, key=lambda stage: stage.gradients - stage.weights)
        return None

    def _start(self, rank: int, kind: PassKind, stage: _Stage, now: float) -> None:
        index = self.placement.stage(rank, stage.chunk)
        end = now + self.costs.seconds[kind][index]
        last = self.placement.num_stages - 1
        if kind is PassKind.FORWARD:
            micro_batch = stage.forwards
            stage.forwards += 1
            if index == last:
                stage.gradient_arrivals.append(end)
            else:
                self._send(rank, index + 1, end, is_forward=True)
        elif kind is PassKind.INPUT_BACKWARD:
            micro_batch = stage.gradients
            stage.gradients += 1
            if index > 0:
                self._send(rank, index - 1, end, is_forward=False)
        else:
            micro_batch = stage.weights
            stage.weights += 1
        self.orders[rank].append(Pass(kind, stage.chunk, micro_batch))
        self.free_at[rank] = end
        heapq.heappush(self.wakes, (end, rank))

    def _send(self, rank: int, to_stage: int, end: float, is_forward: bool) -> None:
        to_rank = self.placement.rank(to_stage)
        arrival = end if to_rank == rank else end + self.costs.transfer
        chunk = 0 if self.placement.stage(to_rank, 0) == to_stage else 1
        stage = self.stages[to_rank][chunk]
        (stage.forward_arrivals if is_forward else stage.gradient_arrivals).append(arrival)
        heapq.heappush(self.wakes, (arrival, to_rank))


def _has_arrived(arrivals: list[float], index: int, now: float) -> bool:
    return index < len(arrivals) and arrivals[index] <= now
