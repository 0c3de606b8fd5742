"""How long a step takes on a pipeline: the stages' passes under 1F1B, the sends between them, and what every step pays.

A step is played through, event by event. Each stage runs its passes one after the other in the order of 1F1B, and each
pass as soon as its input is there: a forward pass needs the same micro-batch's forward pass of the stage before, a
backward pass the backward pass of the stage after. Transfers are part of a pass's seconds, because DeepSpeed sends and
receives synchronously. Equal stages need no playing: their time has a closed form.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache

MOST_PLAYED = 50_000
"""Passes of a step that are played before the rest is extrapolated: about ten milliseconds."""
STEADY_TOLERANCE = 1e-9
"""Relative, between what a further micro-batch adds and what the slowest stage needs for it."""


@dataclass(frozen=True)
class PassSeconds:
    """How long a micro-batch's passes take on every stage, from the first to the last."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]

    @cached_property
    def slowest_stage(self) -> float:
        """Return the seconds of a forward and a backward pass on the stage where they take longest."""
        return max(map(sum, zip(self.forward, self.backward, strict=True)))

    @property
    def busy(self) -> float:
        """Return the seconds of a forward and a backward pass, summed over all stages."""
        return sum(self.forward) + sum(self.backward)


# `pipeline_seconds` asks for neighbouring counts, and different layouts of a search for the same stages.
@lru_cache(maxsize=4096)
def simulate(passes: PassSeconds, num_microbatches: int) -> float:
    """Return the seconds from the first pass to the last, with every pass played in the order of 1F1B.

    PipeDream-Flush: Narayanan et al., arXiv 2104.04473, figure 4, which DeepSpeed runs. Stage s of p stages first runs
    p - s forward passes (all, where there are fewer), then a backward and a forward pass in turn until no micro-batch
    is left to start, then the backward passes that are left.
    """
    # In turn i every stage s plays the forward pass of micro-batch i and then the backward pass of micro-batch
    # i - (p - 1 - s), where there are such: that is the stage's own order. The backward pass waits for the next stage's
    # of the same micro-batch, which was that stage's last pass of the turn before.
    forward, backward = passes.forward, passes.backward
    last = len(forward) - 1
    ended = [0.0] * len(forward)  # when each stage has ended its last pass
    for turn in range(num_microbatches):
        arrived = 0.0  # when the stage before has ended the forward pass; the data wait for no stage
        for stage in range(last + 1):
            now = ended[stage]
            if arrived > now:
                now = arrived
            now += forward[stage]
            arrived = now
            if stage >= last - turn:
                if stage < last and ended[stage + 1] > now:
                    now = ended[stage + 1]
                now += backward[stage]
            ended[stage] = now
    for turn in range(num_microbatches, num_microbatches + last):
        for stage in range(max(0, last - turn), num_microbatches + last - turn):
            ended[stage] = max(ended[stage], ended[stage + 1]) + backward[stage]
    return ended[0]


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
        if self._has_equal_stages:
            slowest_stage = self._passes(micro_batch_size).slowest_stage
            return equal_stages_seconds(len(self.stages), num_microbatches, slowest_stage)
        if self._is_proportional:
            # The passes of one sample, scaled: a search over sizes then plays the same pipeline only once.
            return micro_batch_size * self._played(1, num_microbatches)
        return self._played(micro_batch_size, num_microbatches)

    @cached_property
    def _passes(self) -> Callable[[int], PassSeconds]:
        """Return ``passes`` with what it has computed before."""
        return cache(self.passes)

    @cached_property
    def _played(self) -> Callable[[int, int], float]:
        """Return a function of (micro-batch size, number of micro-batches) that plays each pair only once."""
        return cache(lambda size, num_microbatches: pipeline_seconds(self._passes(size), num_microbatches))

    @cached_property
    def _has_equal_stages(self) -> bool:
        return len(set(self.stages)) == 1

    @cached_property
    def _is_proportional(self) -> bool:
        """Tell whether no time is the same for every size of a micro-batch, as with the costs of a data sheet."""
        passes = [line for stage in self.stages for line in (stage.forward, stage.backward)]
        return all(line.seconds == 0 for line in (*passes, self.transfer))

    def step_seconds(self, micro_batch_size: int, num_microbatches: int) -> float:
        """Return the seconds of a whole step."""
        return self.pipeline_seconds(micro_batch_size, num_microbatches) + self.fixed_seconds

    def least_step_seconds(self, micro_batch_size: int, num_microbatches: int) -> float:
        """Return a bound below ``step_seconds``, but for rounding, that needs no playing and is near it."""
        passes = self._passes(micro_batch_size)
        least = 0.0
        # The first micro-batch comes through all stages before a stage, and the last one goes back through them.
        before = 0.0
        for both in map(sum, zip(passes.forward, passes.backward, strict=True)):
            least = max(least, before + num_microbatches * both)
            before += both
        return least + self.fixed_seconds

    def idle_share(self, micro_batch_size: int, num_microbatches: int) -> float:
        """Compute the share of the pipeline's time in which a stage waits, on average over the stages.

        It is ``bubble`` and what unequal stages add to it.
        """
        busy = num_microbatches * self.passes(micro_batch_size).busy / len(self.stages)
        return 1 - busy / self.pipeline_seconds(micro_batch_size, num_microbatches)
