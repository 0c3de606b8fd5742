"""How long a step takes on a pipeline: the stages' passes, the sends between them, and what every step pays once."""

from __future__ import annotations

from dataclasses import dataclass

from megastable.core.pipeline_simulation import PassSeconds, pipeline_seconds


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
