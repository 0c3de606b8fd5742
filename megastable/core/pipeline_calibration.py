"""The cost of a step from measured steps.

Measured are whole steps, of which equal stages make (m + p - 1)(a + b x micro-batch size) + c. The three numbers are
those that leave the least squares of relative errors. Steps of a single micro-batch size cannot tell a from b, so a is
0 there, and two numbers are left: the speed without bubble (the peak), and the fixed cost of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megastable.core.errors import UserError
from megastable.core.flops import BACKWARD_FORWARD_RATIO
from megastable.core.pipeline_cost import MicroBatchTime, PipelineCost, StageTime


@dataclass(frozen=True)
class MeasuredStep:
    """One point of a sweep: the batch of a replica, and how long its step took."""

    micro_batch_size: int
    num_microbatches: int
    step_seconds: float

    @classmethod
    def of_throughput(
        cls, tflops_per_device: float, flops_per_sample: float, micro_batch_size: int, num_microbatches: int,
        devices_per_replica: int,
    ) -> MeasuredStep:  # fmt: skip
        """A step whose speed was published instead of its time."""
        flops = flops_per_sample * micro_batch_size * num_microbatches
        seconds = flops / (tflops_per_device * 1e12 * devices_per_replica)
        return cls(micro_batch_size, num_microbatches, seconds)


def calibrate(steps: Sequence[MeasuredStep], num_stages: int) -> PipelineCost:
    """The pipeline of ``num_stages`` equal stages that fits the measured steps best.

    No cost is negative: one that would be is left out, and the others are fitted again.

    Raises:
        UserError: there are too few different steps.
    """
    if len({(step.micro_batch_size, step.num_microbatches) for step in steps}) < 2:
        raise UserError("a calibration needs measured steps of at least two batches")
    kept = ["per_sample", "fixed"]
    if len({step.micro_batch_size for step in steps}) > 1:
        kept.insert(0, "per_micro_batch")
    rows = [_terms(step, num_stages) for step in steps]
    while True:
        # Dividing by the measured time makes every error a relative one.
        matrix = [[row[name] / step.step_seconds for name in kept] for row, step in zip(rows, steps, strict=True)]
        found = dict(zip(kept, _least_squares(matrix), strict=True))
        worst = min(found, key=lambda name: found[name])
        if found[worst] >= 0 or len(kept) == 1:
            break
        kept.remove(worst)
    per_stage = MicroBatchTime(found.get("per_micro_batch", 0.0), found.get("per_sample", 0.0))
    return PipelineCost((_split(per_stage),) * num_stages, fixed_seconds=found.get("fixed", 0.0))


def _terms(step: MeasuredStep, num_stages: int) -> dict[str, float]:
    slots = step.num_microbatches + num_stages - 1
    return {"per_micro_batch": slots, "per_sample": slots * step.micro_batch_size, "fixed": 1.0}


def _split(both: MicroBatchTime) -> StageTime:
    """A step's time does not tell forward from backward, and on equal stages does not depend on it."""
    forward, backward = (
        MicroBatchTime(both.seconds * share, both.seconds_per_sample * share)
        for share in (1 / (1 + BACKWARD_FORWARD_RATIO), BACKWARD_FORWARD_RATIO / (1 + BACKWARD_FORWARD_RATIO))
    )
    return StageTime(forward, backward)


def _least_squares(matrix: Sequence[Sequence[float]]) -> list[float]:
    """x that brings ``matrix @ x`` nearest to all ones, by the normal equations; a column that adds nothing gets 0."""
    width = len(matrix[0])
    scale = [sum(row[j] ** 2 for row in matrix) ** 0.5 for j in range(width)]
    scaled = [[row[j] / scale[j] for j in range(width)] for row in matrix]
    system = [
        [*(sum(row[i] * row[j] for row in scaled) for j in range(width)), sum(row[i] for row in scaled)]
        for i in range(width)
    ]
    for i in range(width):
        if abs(system[i][i]) < 1e-12:
            system[i] = [0.0] * i + [1.0] + [0.0] * (width - i)
        for below in range(width):
            if below != i:
                factor = system[below][i] / system[i][i]
                system[below] = [value - factor * pivot for value, pivot in zip(system[below], system[i], strict=True)]
    return [system[i][width] / system[i][i] / scale[i] for i in range(width)]
