"""A step of a pipeline played through, event by event: for unequal stages, and for schedules beside 1F1B.

Each stage runs its passes one after the other in the order of its schedule, and each as soon as its input is there. A
forward pass needs the same micro-batch's forward pass of the stage before, a backward pass the backward pass of the
stage after. Transfers are part of a pass's seconds: DeepSpeed sends and receives synchronously.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

FORWARD, BACKWARD = 0, 1
Pass = tuple[int, int]
"""(FORWARD or BACKWARD, micro-batch)."""
STEADY_TOLERANCE = 1e-9
"""Relative, between what a further micro-batch adds and what the slowest stage needs for it."""


def one_forward_one_backward(stage: int, num_stages: int, num_microbatches: int) -> list[Pass]:
    """1F1B (PipeDream-Flush; Narayanan et al., arXiv 2104.04473, figure 4), DeepSpeed's own: few are in flight."""
    in_flight = min(num_stages - stage, num_microbatches)
    passes = [(FORWARD, micro_batch) for micro_batch in range(in_flight)]
    for micro_batch in range(num_microbatches):
        passes.append((BACKWARD, micro_batch))
        if micro_batch + in_flight < num_microbatches:
            passes.append((FORWARD, micro_batch + in_flight))
    return passes


def all_forward_all_backward(stage: int, num_stages: int, num_microbatches: int) -> list[Pass]:
    """GPipe (Huang et al., arXiv 1811.06965): every micro-batch is in flight before the first backward pass."""
    return [(kind, micro_batch) for kind in (FORWARD, BACKWARD) for micro_batch in range(num_microbatches)]


SCHEDULES: dict[str, Callable[[int, int, int], list[Pass]]] = {
    "1f1b": one_forward_one_backward,
    "gpipe": all_forward_all_backward,
}


@dataclass(frozen=True)
class PassSeconds:
    """How long a micro-batch's passes take on every stage, from the first to the last."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]

    @property
    def slowest_stage(self) -> float:
        """Seconds of a forward and a backward pass on the stage where they take longest."""
        return max(map(sum, zip(self.forward, self.backward, strict=True)))

    @property
    def busy(self) -> float:
        """Seconds of a forward and a backward pass over all stages together."""
        return sum(self.forward) + sum(self.backward)


def pipeline_seconds(passes: PassSeconds, num_microbatches: int, schedule: str = "1f1b") -> float:
    """Seconds from the first pass to the last.

    Once the pipeline runs steadily a further micro-batch adds what the slowest stage needs for it, so a long step is
    played only until that is so. The nearer the other stages are to the slowest, the longer it takes.
    """
    played = len(passes.forward) + 1
    while played < num_microbatches:
        seconds = _play(passes, played, schedule)
        added = seconds - _play(passes, played - 1, schedule)
        if abs(added - passes.slowest_stage) <= STEADY_TOLERANCE * passes.slowest_stage:
            return seconds + (num_microbatches - played) * passes.slowest_stage
        played *= 2
    return _play(passes, num_microbatches, schedule)


@lru_cache(maxsize=4096)
def _play(passes: PassSeconds, num_microbatches: int, schedule: str) -> float:
    return simulate(passes, num_microbatches, schedule)


def simulate(passes: PassSeconds, num_microbatches: int, schedule: str = "1f1b") -> float:
    """Seconds from the first pass to the last, every pass played."""
    num_stages = len(passes.forward)
    todo = [SCHEDULES[schedule](stage, num_stages, num_microbatches) for stage in range(num_stages)]
    done = [0] * num_stages
    clock = [0.0] * num_stages
    ended: tuple[list[list[float]], list[list[float]]] = ([[] for _ in todo], [[] for _ in todo])
    left = sum(map(len, todo))
    while left:
        for stage in range(num_stages):
            while done[stage] < len(todo[stage]):
                kind, micro_batch = todo[stage][done[stage]]
                source = stage - 1 if kind == FORWARD else stage + 1
                ready = _ready(ended[kind], source, micro_batch)
                if ready is None:
                    break
                seconds = (passes.forward, passes.backward)[kind][stage]
                clock[stage] = max(clock[stage], ready) + seconds
                ended[kind][stage].append(clock[stage])
                done[stage] += 1
                left -= 1
    return max(clock)


def _ready(ended: Sequence[Sequence[float]], source: int, micro_batch: int) -> float | None:
    """When ``source`` has passed the micro-batch on; None where that is not known yet. The ends wait for nobody."""
    if not 0 <= source < len(ended):
        return 0.0
    return ended[source][micro_batch] if micro_batch < len(ended[source]) else None
