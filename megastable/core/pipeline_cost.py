"""How long a step takes on a pipeline: the stages' passes under 1F1B, the sends between them, and what every step pays.

A step is played through, event by event. Each stage runs its passes one after the other in the order of 1F1B, and each
pass as soon as its input is there: a forward pass needs the same micro-batch's forward pass of the stage before, a
backward pass the backward pass of the stage after. Transfers are part of a pass's seconds, because DeepSpeed sends and
receives synchronously. Equal stages need no playing: their time has a closed form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

FORWARD = 0
BACKWARD = 1
Pass = tuple[int, int]
"""(FORWARD or BACKWARD, micro-batch)."""
MOST_PLAYED = 50_000
"""Passes of a step that are played before the rest is extrapolated, about a twentieth of a second."""
STEADY_TOLERANCE = 1e-9
"""Relative, between what a further micro-batch adds and what the slowest stage needs for it."""


def one_forward_one_backward(stage: int, num_stages: int, num_microbatches: int) -> list[Pass]:
    """List a stage's passes in the order of 1F1B, which DeepSpeed runs.

    PipeDream-Flush: Narayanan et al., arXiv 2104.04473, figure 4. At most ``num_stages - stage`` micro-batches are in
    flight on a stage, so its activations do not grow with the number of micro-batches.
    """
    in_flight = min(num_stages - stage, num_microbatches)
    # The warmup fills the pipeline below this stage, the last stage included.
    passes = [(FORWARD, micro_batch) for micro_batch in range(in_flight)]
    # From here on a backward pass frees the place of the next forward pass, until no micro-batch is left to start.
    for micro_batch in range(num_microbatches):
        passes.append((BACKWARD, micro_batch))
        if micro_batch + in_flight < num_microbatches:
            passes.append((FORWARD, micro_batch + in_flight))
    return passes


@dataclass(frozen=True)
class PassSeconds:
    """How long a micro-batch's passes take on every stage, from the first to the last."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]

    @property
    def slowest_stage(self) -> float:
        """Return the seconds of a forward and a backward pass on the stage where they take longest."""
        return max(map(sum, zip(self.forward, self.backward, strict=True)))

    @property
    def busy(self) -> float:
        """Return the seconds of a forward and a backward pass, summed over all stages."""
        return sum(self.forward) + sum(self.backward)


# The search of a layout asks for the same stages again and again, and `pipeline_seconds` for neighbouring counts.
@lru_cache(maxsize=4096)
def simulate(passes: PassSeconds, num_microbatches: int) -> float:
    """Return the seconds from the first pass to the last, with every pass played."""
    num_stages = len(passes.forward)
    seconds_of = (passes.forward, passes.backward)
    orders = [one_forward_one_backward(stage, num_stages, num_microbatches) for stage in range(num_stages)]
    num_played = [0] * num_stages
    clock = [0.0] * num_stages
    # ended[kind][stage][micro_batch]. A stage takes the passes of a kind in the order of the micro-batches, so the
    # list's length tells which of them have ended.
    ended: tuple[list[list[float]], list[list[float]]] = ([[] for _ in orders], [[] for _ in orders])
    passes_left = sum(map(len, orders))
    while passes_left:
        # Play each stage until it has to wait for a neighbour. The order of the stages does not change any clock: a
        # pass starts when its stage is free and its input is there, whenever it is played.
        for stage in range(num_stages):
            while num_played[stage] < len(orders[stage]):
                kind, micro_batch = orders[stage][num_played[stage]]
                source = stage - 1 if kind == FORWARD else stage + 1
                ready = _seconds_when_ready(ended[kind], source, micro_batch)
                if ready is None:
                    break
                clock[stage] = max(clock[stage], ready) + seconds_of[kind][stage]
                ended[kind][stage].append(clock[stage])
                num_played[stage] += 1
                passes_left -= 1
    return max(clock)


def _seconds_when_ready(ended: Sequence[Sequence[float]], source: int, micro_batch: int) -> float | None:
    """Return when the stage ``source`` ended its pass of the micro-batch; None where that pass was not played yet."""
    # Before the first stage are the data and after the last one is the loss, which wait for no other stage.
    if not 0 <= source < len(ended):
        return 0.0
    if micro_batch >= len(ended[source]):
        return None
    return ended[source][micro_batch]


def pipeline_seconds(passes: PassSeconds, num_microbatches: int) -> float:
    """Return the seconds from the first pass to the last.

    Once the pipeline runs steadily, a further micro-batch adds what the slowest stage needs for it, so a long step is
    played only until that is so. The nearer the other stages are to the slowest, the later it becomes steady; but then
    the sooner a micro-batch adds nearly as much, which is taken for steady after ``MOST_PLAYED`` passes.
    """
    num_stages = len(passes.forward)
    # With no more micro-batches than stages, the pipeline does not even fill.
    played = num_stages + 1
    while played < num_microbatches:
        seconds = simulate(passes, played)
        added = seconds - simulate(passes, played - 1)
        is_steady = abs(added - passes.slowest_stage) <= STEADY_TOLERANCE * passes.slowest_stage
        if is_steady or 2 * played * num_stages > MOST_PLAYED:
            return seconds + (num_microbatches - played) * passes.slowest_stage
        # Doubled, so that however late it becomes steady, at most about twice the passes needed for that are played.
        played *= 2
    return simulate(passes, num_microbatches)


def equal_stages_seconds(num_stages: int, num_microbatches: int, pass_seconds: float) -> float:
    """Compute (m + p - 1)(forward + backward), the time of 1F1B on ``num_stages`` equal stages.

    Args:
        pass_seconds: of one micro-batch's forward and backward pass on one stage.
    """
    return (num_microbatches + num_stages - 1) * pass_seconds


def bubble(num_stages: int, num_microbatches: int) -> float:
    """Compute the idle share of a pipeline's time, (p - 1) / (m + p - 1).

    Narayanan et al., arXiv 2104.04473, section 2.2, whose figure is relative to the busy time: (p - 1) / m. It holds
    for equal stages, without transfers and fixed costs.
    """
    return (num_stages - 1) / (num_microbatches + num_stages - 1)


@dataclass(frozen=True)
class MicroBatchTime:
    """Seconds of one micro-batch as a line over its size: what it costs whatever its size, and what a sample adds."""

    seconds: float = 0.0
    seconds_per_sample: float = 0.0

    def at(self, micro_batch_size: int) -> float:
        """Return the seconds of a micro-batch of ``micro_batch_size`` samples."""
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
        """Return the seconds of the passes of every stage, transfers included."""
        # A single stage sends nothing.
        sending = self.transfer.at(micro_batch_size) if len(self.stages) > 1 else 0.0
        return PassSeconds(
            forward=tuple(stage.forward.at(micro_batch_size) + sending for stage in self.stages),
            backward=tuple(stage.backward.at(micro_batch_size) + sending for stage in self.stages),
        )

    def pipeline_seconds(self, micro_batch_size: int, num_microbatches: int) -> float:
        """Return the seconds from the first pass to the last, in closed form where all stages are equal."""
        passes = self.passes(micro_batch_size)
        if len(set(self.stages)) == 1:
            return equal_stages_seconds(len(self.stages), num_microbatches, passes.slowest_stage)
        if self._is_proportional:
            # The passes of one sample, scaled: a search over sizes then plays the same pipeline only once.
            return micro_batch_size * pipeline_seconds(self.passes(1), num_microbatches)
        return pipeline_seconds(passes, num_microbatches)

    @property
    def _is_proportional(self) -> bool:
        """Tell whether no time is the same for every size of a micro-batch, as with the costs of a data sheet."""
        passes = [line for stage in self.stages for line in (stage.forward, stage.backward)]
        return all(line.seconds == 0 for line in (*passes, self.transfer))

    def step_seconds(self, micro_batch_size: int, num_microbatches: int) -> float:
        """Return the seconds of a whole step."""
        return self.pipeline_seconds(micro_batch_size, num_microbatches) + self.fixed_seconds

    def idle_share(self, micro_batch_size: int, num_microbatches: int) -> float:
        """Compute the share of the pipeline's time in which a stage waits, on average over the stages.

        It is ``bubble`` and what unequal stages add to it.
        """
        busy = num_microbatches * self.passes(micro_batch_size).busy / len(self.stages)
        return 1 - busy / self.pipeline_seconds(micro_batch_size, num_microbatches)
