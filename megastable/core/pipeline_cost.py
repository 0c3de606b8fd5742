"""A step of a pipeline played through, event by event: for unequal stages, and for schedules beside 1F1B.

Each stage runs its passes one after the other in the order of its schedule, and each as soon as its input is there. A
forward pass needs the same micro-batch's forward pass of the stage before, a backward pass the backward pass of the
stage after. Transfers are part of a pass's seconds: DeepSpeed sends and receives synchronously.

How long a step takes on a pipeline: the stages' passes, the sends between them, and what every step pays once.
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


def bubble(num_stages: int, num_microbatches: int) -> float:
    """Idle share of a pipeline's time, (p - 1) / (m + p - 1): Narayanan et al., arXiv 2104.04473, section 2.2.

    Theirs is relative to the busy time, (p - 1) / m. Of equal stages, without transfers and fixed costs.
    """
    return (num_stages - 1) / (num_microbatches + num_stages - 1)


def equal_stages_seconds(num_stages: int, num_microbatches: int, pass_seconds: float) -> float:
    """(m + p - 1)(forward + backward): 1F1B and GPipe on ``num_stages`` equal stages.

    Args:
        pass_seconds: of one micro-batch's forward and backward pass on one stage.
    """
    return (num_microbatches + num_stages - 1) * pass_seconds


@dataclass(frozen=True)
class MicroBatchTime:
    """Seconds of one micro-batch as a line over its size: what it costs whatever its size, and what a sample adds."""

    seconds: float = 0.0
    seconds_per_sample: float = 0.0

    def at(self, micro_batch_size: int) -> float:
        """Seconds of a micro-batch of so many samples."""
        return self.seconds + micro_batch_size * self.seconds_per_sample


@dataclass(frozen=True)
class StageTime:
    """What a stage computes for one micro-batch."""

    forward: MicroBatchTime
    backward: MicroBatchTime


@dataclass(frozen=True)
class PipelineCost:
    """The cost of a step on one layout.

    Attributes:
        stages: from the first to the last.
        transfer: sending one activation, or one gradient, to a neighbouring stage. It is counted in every pass of every
            stage, since sender and receiver both wait for it; the two ends, which have one neighbour, are charged like
            the others.
        fixed_seconds: once a step: reducing the gradients, updating the weights.
    """

    stages: tuple[StageTime, ...]
    transfer: MicroBatchTime = MicroBatchTime()
    fixed_seconds: float = 0.0

    def passes(self, micro_batch_size: int) -> PassSeconds:
        """Seconds of the passes of every stage, transfers included."""
        sending = self.transfer.at(micro_batch_size) if len(self.stages) > 1 else 0.0
        return PassSeconds(
            forward=tuple(stage.forward.at(micro_batch_size) + sending for stage in self.stages),
            backward=tuple(stage.backward.at(micro_batch_size) + sending for stage in self.stages),
        )

    def pipeline_seconds(self, micro_batch_size: int, num_microbatches: int, schedule: str = "1f1b") -> float:
        """Seconds from the first pass to the last: the closed form where all stages are equal, else simulated."""
        passes = self.passes(micro_batch_size)
        if len(set(self.stages)) == 1:
            return equal_stages_seconds(len(self.stages), num_microbatches, passes.slowest_stage)
        return pipeline_seconds(passes, num_microbatches, schedule)

    def step_seconds(self, micro_batch_size: int, num_microbatches: int, schedule: str = "1f1b") -> float:
        """Seconds of a whole step."""
        return self.pipeline_seconds(micro_batch_size, num_microbatches, schedule) + self.fixed_seconds

    def idle_share(self, micro_batch_size: int, num_microbatches: int, schedule: str = "1f1b") -> float:
        """Share of the pipeline's time in which a stage waits, on average: ``bubble``, and what unequal stages add."""
        busy = num_microbatches * self.passes(micro_batch_size).busy / len(self.stages)
        return 1 - busy / self.pipeline_seconds(micro_batch_size, num_microbatches, schedule)
