"""The cost of a step from measured steps.

Measured are whole steps, of which equal stages make (m + p - 1)(a + b x micro-batch size) + c. The three numbers are
those that leave the least squares of relative errors. Steps of a single micro-batch size cannot tell a from b, so a is
0 there, and two numbers are left: the speed without bubble (the peak), and the fixed cost of a step.

Stages of unequal work have the same three numbers: a and b are those of the slowest, the others have their share of
them, and in place of (m + p - 1) stands what a pipeline of such stages takes where the slowest takes 1.

The cost of a run's steps from what pieces of its model take: a block, and both ends.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megastable.config.stages import model_parts, model_shape
from megastable.core.errors import UserError
from megastable.core.flops import BACKWARD_FORWARD_RATIO
from megastable.core.layers import stage_parameters
from megastable.core.pipeline_cost import MicroBatchTime, PipelineCost, StageTime
from megastable.planning.run_plan import RunPlan, recomputation
from megastable.planning.step_time import communication_bytes, number_format


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
    """The pipeline of ``num_stages`` equal stages that fits best; errors as ``calibrate_unequal``."""
    # A step's time does not tell forward from backward, and on equal stages does not depend on it.
    forward, backward = (
        MicroBatchTime(seconds_per_sample=1.0),
        MicroBatchTime(seconds_per_sample=BACKWARD_FORWARD_RATIO),
    )
    return calibrate_unequal(steps, PipelineCost((StageTime(forward, backward),) * num_stages))


def calibrate_unequal(steps: Sequence[MeasuredStep], work: PipelineCost) -> PipelineCost:
    """The pipeline that fits the measured steps best and divides its time among stages and passes as ``work`` does.

    No cost is negative: one that would be is left out, and the others are fitted again.

    Args:
        work: of one sample on every stage, in any unit.

    Raises:
        UserError: there are too few different steps.
    """
    if len({(step.micro_batch_size, step.num_microbatches) for step in steps}) < 2:
        raise UserError("a calibration needs measured steps of at least two batches")
    kept = ["per_sample", "fixed"]
    if len({step.micro_batch_size for step in steps}) > 1:
        kept.insert(0, "per_micro_batch")
    shares = _shares_of_slowest(work)
    # Dividing by the measured time makes every error a relative one.
    terms = [(_terms(step, shares), step.step_seconds) for step in steps]
    found = _fitted([{name: value / took for name, value in row.items()} for row, took in terms], kept)
    slowest = MicroBatchTime(found.get("per_micro_batch", 0.0), found.get("per_sample", 0.0))
    stages = tuple(
        StageTime(_scaled(slowest, stage.forward.at(1)), _scaled(slowest, stage.backward.at(1)))
        for stage in shares.stages
    )
    return PipelineCost(stages, fixed_seconds=found.get("fixed", 0.0))


def line_through(seconds: Mapping[int, float]) -> MicroBatchTime:
    """The line over the micro-batch size that fits measured ``seconds`` best, relatively; no part of it is negative.

    Of a single size it goes through the origin.
    """
    kept = ["seconds", "seconds_per_sample"] if len(seconds) > 1 else ["seconds_per_sample"]
    rows = [{"seconds": 1 / took, "seconds_per_sample": size / took} for size, took in seconds.items()]
    return MicroBatchTime(**_fitted(rows, kept))


def _fitted(rows: Sequence[Mapping[str, float]], names: Sequence[str]) -> dict[str, float]:
    """What the named columns are to be multiplied by so that every row sums to 1. None is negative: it is left out."""
    kept = list(names)
    while True:
        found = dict(zip(kept, _least_squares([[row[name] for name in kept] for row in rows]), strict=True))
        worst = min(found, key=lambda name: found[name])
        if found[worst] >= 0 or len(kept) == 1:
            return found
        kept.remove(worst)


def _shares_of_slowest(work: PipelineCost) -> PipelineCost:
    """The work of a sample in units of the slowest stage's two passes."""
    whole = work.passes(1).slowest_stage
    return PipelineCost(
        tuple(
            StageTime(
                *(MicroBatchTime(seconds_per_sample=one.at(1) / whole) for one in (stage.forward, stage.backward))
            )
            for stage in work.stages
        )
    )


def _terms(step: MeasuredStep, shares: PipelineCost) -> dict[str, float]:
    slots = shares.pipeline_seconds(1, step.num_microbatches)
    return {"per_micro_batch": slots, "per_sample": slots * step.micro_batch_size, "fixed": 1.0}


def _scaled(time: MicroBatchTime, factor: float) -> MicroBatchTime:
    return MicroBatchTime(time.seconds * factor, time.seconds_per_sample * factor)


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


FIRST, BLOCK, LAST = "first", "block", "last"
SIZES_TO_CHOOSE_FROM = (1, 2, 4, 8)
COPIES_OF_A_MESSAGE = 2
"""Into the socket and out of it."""


@dataclass(frozen=True)
class Probe:
    """What one process measured.

    Attributes:
        passes: piece of the model -> its two passes.
        update_seconds: of one weight.
        copy_seconds: of one byte.
    """

    passes: dict[str, StageTime]
    update_seconds: float
    copy_seconds: float


def planned_sizes(plan: RunPlan) -> set[int]:
    """The micro-batch sizes of the plan, or a spread where they are still to be chosen."""
    if plan.run.megastable.batch_rampup.chooses_micro_batch_sizes:
        return set(SIZES_TO_CHOOSE_FROM)
    return {phase.batch.micro_batch_size for phase in plan.phases}


def probed_sizes(planned: set[int]) -> list[int]:
    """All planned sizes; a single one gets a neighbour, so that there is a line to draw."""
    if len(planned) > 1:
        return sorted(planned)
    (size,) = planned
    return sorted({size, size // 2 or 2})


def cost_of(plan: RunPlan, probed: Probe) -> PipelineCost:
    """The cost of the plan's steps, from what its pieces take."""
    model, layout = plan.run.megastable.model, plan.layout
    shape, parts, ranks = model_shape(model), model_parts(model), layout.tensor_parallel_size
    times, fixed = [], []
    for stage in plan.cut.stages:
        pieces = {FIRST: int(stage.is_first), BLOCK: stage.num_blocks, LAST: int(stage.is_last)}
        forward = _sum({name: probed.passes[name].forward for name in pieces}, pieces, ranks)
        backward = _sum({name: probed.passes[name].backward for name in pieces}, pieces, ranks)
        if recomputation(plan.run).whole_blocks:  # halves recompute themselves, and were timed so
            again = _sum({BLOCK: probed.passes[BLOCK].forward}, pieces, ranks)
            backward = MicroBatchTime(
                backward.seconds + again.seconds, backward.seconds_per_sample + again.seconds_per_sample
            )
        times.append(StageTime(forward, backward))
        weights, replicas = stage_parameters(shape, parts, stage, ranks), layout.data_parallel_size
        travelling = 2 * communication_bytes(plan.run) + number_format(plan.run).weight_bytes
        sent = (replicas - 1) / replicas * weights * travelling
        fixed.append(weights / replicas * probed.update_seconds + sent * COPIES_OF_A_MESSAGE * probed.copy_seconds)
    message = model.seq_length * model.hidden_size * number_format(plan.run).weight_bytes
    transfer = MicroBatchTime(seconds_per_sample=message * COPIES_OF_A_MESSAGE * probed.copy_seconds)
    return PipelineCost(tuple(times), transfer, max(fixed))


def _sum(times: Mapping[str, MicroBatchTime], counts: Mapping[str, int], ranks: int) -> MicroBatchTime:
    """So many of each, shared out over tensor ranks."""
    return MicroBatchTime(
        sum(counts[name] * time.seconds for name, time in times.items()) / ranks,
        sum(counts[name] * time.seconds_per_sample for name, time in times.items()) / ranks,
    )


def mean_probe(probes: Sequence[Probe]) -> Probe:
    """The mean of what several processes measured."""

    def line(lines: list[MicroBatchTime]) -> MicroBatchTime:
        return MicroBatchTime(
            statistics.mean(line.seconds for line in lines), statistics.mean(line.seconds_per_sample for line in lines)
        )

    passes = {
        name: StageTime(
            line([one.passes[name].forward for one in probes]), line([one.passes[name].backward for one in probes])
        )
        for name in probes[0].passes
    }
    return Probe(
        passes,
        statistics.mean(one.update_seconds for one in probes),
        statistics.mean(one.copy_seconds for one in probes),
    )
