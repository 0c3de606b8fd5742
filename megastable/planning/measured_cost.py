"""The cost of a run's steps from measurements, in place of a data sheet.

Two kinds of measurement give the same ``PipelineCost``:

* Whole steps of a sweep (``calibrate``). On p equal stages, m micro-batches make a step of (m + p - 1)(a + b x
  micro-batch size) + c seconds. a is what a micro-batch costs whatever its size, b what a sample adds, c what a step
  costs once; the three are fitted. Of unequal stages, a and b are those of the slowest, the others have their share of
  them, and in place of (m + p - 1) stands what a pipeline of such stages takes where the slowest takes 1.
* Pieces of the model, each timed alone (``probed_cost``): a block, and both ends. A stage takes what its pieces take.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megastable.core.errors import UserError
from megastable.core.flops import BACKWARD_FORWARD_RATIO
from megastable.core.pipeline_cost import MicroBatchTime, PipelineCost, StageTime
from megastable.planning.number_formats import stream_bytes, update_bytes_sent
from megastable.planning.run_plan import RunPlan, recomputation

PER_MICRO_BATCH, PER_SAMPLE, FIXED = "per_micro_batch", "per_sample", "fixed"
"""The costs a, b and c of a step, which ``calibrate`` fits."""
SMALLEST_PIVOT = 1e-12
"""A diagonal element of the normal equations that is smaller is rounding: its column depends on those before."""
FIRST, BLOCK, LAST = "first", "block", "last"
"""The pieces that a probe times: the layers before the blocks, one block, and the layers after the blocks."""
SIZES_TO_CHOOSE_FROM = (1, 2, 4, 8)
COPIES_OF_A_MESSAGE = 2
"""Copies in memory by which processes of one machine send a message: into the socket and out of it."""


# Whole steps


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
        """Compute the time of a step whose speed was published instead."""
        flops = flops_per_sample * micro_batch_size * num_microbatches
        seconds = flops / (tflops_per_device * 1e12 * devices_per_replica)
        return cls(micro_batch_size, num_microbatches, seconds)


def calibrate(steps: Sequence[MeasuredStep], num_stages: int) -> PipelineCost:
    """Fit the cost of ``num_stages`` equal stages to measured steps; errors as ``calibrate_unequal``."""
    # On equal stages the time of a step is the same however it divides into forward and backward passes, so that any
    # ratio would do; that of the operations gives plausible passes.
    forward = MicroBatchTime(seconds_per_sample=1.0)
    backward = MicroBatchTime(seconds_per_sample=BACKWARD_FORWARD_RATIO)
    return calibrate_unequal(steps, PipelineCost((StageTime(forward, backward),) * num_stages))


def calibrate_unequal(steps: Sequence[MeasuredStep], work: PipelineCost) -> PipelineCost:
    """Fit the cost of a pipeline to measured steps; its time divides among stages and passes as ``work`` does.

    The fit leaves the least squares of relative errors. No cost is negative: one that would be is left out, and the
    others are fitted again.

    Args:
        work: of one sample on every stage, in any unit.

    Raises:
        UserError: there are too few different steps.
    """
    if len({(step.micro_batch_size, step.num_microbatches) for step in steps}) < 2:
        raise UserError("a calibration needs measured steps of at least two batches")
    costs = [PER_SAMPLE, FIXED]
    # Steps of a single micro-batch size cannot tell a from b: a micro-batch then costs what its samples cost.
    if len({step.micro_batch_size for step in steps}) > 1:
        costs.insert(0, PER_MICRO_BATCH)

    shares = _shares_of_slowest(work)
    found = _fit_to_ones([_relative_row(step, shares) for step in steps], costs)

    # What was left out of the fit costs nothing.
    slowest = MicroBatchTime(found.get(PER_MICRO_BATCH, 0.0), found.get(PER_SAMPLE, 0.0))
    stages = tuple(
        StageTime(_scaled(slowest, stage.forward.at(1)), _scaled(slowest, stage.backward.at(1)))
        for stage in shares.stages
    )
    return PipelineCost(stages, fixed_seconds=found.get(FIXED, 0.0))


def line_through(seconds: Mapping[int, float]) -> MicroBatchTime:
    """Fit a line to the ``seconds`` measured at every micro-batch size, by relative errors; no part of it is negative.

    A single size cannot tell the two parts apart, so that its line goes through the origin.
    """
    names = ["seconds_per_sample"]
    if len(seconds) > 1:
        names.insert(0, "seconds")
    rows = [{"seconds": 1 / took, "seconds_per_sample": size / took} for size, took in seconds.items()]
    return MicroBatchTime(**_fit_to_ones(rows, names))


def _shares_of_slowest(work: PipelineCost) -> PipelineCost:
    """Scale the work so that a sample takes the slowest stage 1, both passes together."""
    whole = work.passes(1).slowest_stage
    stages = []
    for stage in work.stages:
        forward = MicroBatchTime(seconds_per_sample=stage.forward.at(1) / whole)
        backward = MicroBatchTime(seconds_per_sample=stage.backward.at(1) / whole)
        stages.append(StageTime(forward, backward))
    return PipelineCost(tuple(stages))


def _relative_row(step: MeasuredStep, shares: PipelineCost) -> dict[str, float]:
    """Return how often each cost occurs in a step, over the measured seconds.

    The costs times this row sum to predicted over measured seconds, which is 1 for a perfect fit. The division makes
    the error of a short step weigh as much as the equal share of a long one.
    """
    # On equal stages this is m + p - 1.
    slots = shares.pipeline_seconds(1, step.num_microbatches)
    took = step.step_seconds
    return {
        PER_MICRO_BATCH: slots / took,
        PER_SAMPLE: slots * step.micro_batch_size / took,
        FIXED: 1.0 / took,
    }


def _scaled(time: MicroBatchTime, factor: float) -> MicroBatchTime:
    return MicroBatchTime(time.seconds * factor, time.seconds_per_sample * factor)


def _fit_to_ones(rows: Sequence[Mapping[str, float]], names: Sequence[str]) -> dict[str, float]:
    """Find the factors of the named columns that bring the sum of every row nearest to 1, none of them negative.

    Where the least squares ask for a negative factor, its column is left out and the others are found again:
    non-negative least squares by greedy removal, which is enough for at most three columns.
    """
    kept = list(names)
    while True:
        matrix = [[row[name] for name in kept] for row in rows]
        factors = dict(zip(kept, _least_squares_of_ones(matrix), strict=True))
        lowest = min(factors, key=lambda name: factors[name])
        if factors[lowest] >= 0 or len(kept) == 1:
            return factors
        kept.remove(lowest)


def _least_squares_of_ones(matrix: Sequence[Sequence[float]]) -> list[float]:
    """Find the x that brings ``matrix @ x`` nearest to all ones; a column that depends on those before it gets 0.

    The normal equations are enough for three columns, and spare the room a library for matrices.
    """
    width = len(matrix[0])
    # Columns of unit length keep rounding small: seconds of a sample and of a step differ by orders of magnitude.
    lengths = [sum(row[column] ** 2 for row in matrix) ** 0.5 for column in range(width)]
    unit = [[row[column] / lengths[column] for column in range(width)] for row in matrix]

    # Row i of the system is the product of column i with every column, and with the ones.
    system = [
        [*(sum(row[i] * row[j] for row in unit) for j in range(width)), sum(row[i] for row in unit)]
        for i in range(width)
    ]

    # Gauss-Jordan elimination. The matrix is positive semi-definite, so its diagonal gives the pivots without a search.
    for pivot in range(width):
        if abs(system[pivot][pivot]) < SMALLEST_PIVOT:
            # Put the equation "this unknown is 0" in place of one that says nothing.
            system[pivot] = [0.0] * pivot + [1.0] + [0.0] * (width - pivot)
        for other in range(width):
            if other != pivot:
                factor = system[other][pivot] / system[pivot][pivot]
                pairs = zip(system[other], system[pivot], strict=True)
                system[other] = [value - factor * pivot_value for value, pivot_value in pairs]

    # Undo the scaling of the columns.
    return [system[column][width] / system[column][column] / lengths[column] for column in range(width)]


# Pieces of the model


@dataclass(frozen=True)
class Probe:
    """The measurements of one process.

    Attributes:
        passes: piece of the model -> its two passes.
        update_seconds: of one weight.
        copy_seconds: of one byte.
    """

    passes: dict[str, StageTime]
    update_seconds: float
    copy_seconds: float


def planned_sizes(plan: RunPlan) -> set[int]:
    """Return the micro-batch sizes of the plan, or a spread of sizes where they are still to be chosen."""
    if plan.run.megastable.batch_rampup.chooses_micro_batch_sizes:
        return set(SIZES_TO_CHOOSE_FROM)
    return {phase.batch.micro_batch_size for phase in plan.phases}


def probed_sizes(planned: set[int]) -> list[int]:
    """Return the sizes to measure: all planned ones; a single one gets a neighbour, since two points make a line."""
    if len(planned) > 1:
        return sorted(planned)
    (size,) = planned
    # Half the size is cheaper to measure than twice it; only 1 has no half.
    neighbour = size // 2 or 2
    return sorted({size, neighbour})


def mean_probe(probes: Sequence[Probe]) -> Probe:
    """Average what several processes measured at the same time."""

    def mean_line(lines: list[MicroBatchTime]) -> MicroBatchTime:
        return MicroBatchTime(
            statistics.mean(line.seconds for line in lines), statistics.mean(line.seconds_per_sample for line in lines)
        )

    # They share the memory's bandwidth as the processes of a run do, and none of them stands for a stage of its own.
    passes = {}
    for name in probes[0].passes:
        forward = mean_line([probe.passes[name].forward for probe in probes])
        backward = mean_line([probe.passes[name].backward for probe in probes])
        passes[name] = StageTime(forward, backward)
    return Probe(
        passes,
        statistics.mean(probe.update_seconds for probe in probes),
        statistics.mean(probe.copy_seconds for probe in probes),
    )


def probed_cost(plan: RunPlan, probe: Probe) -> PipelineCost:
    """Compute the cost of the plan's steps from what the pieces of its model take."""
    stages = []
    fixed = []
    for stage in plan.cut.stages:
        counts = {FIRST: int(stage.is_first), BLOCK: stage.num_blocks, LAST: int(stage.is_last)}
        stages.append(_stage_time(plan, counts, probe))
        # Under ZeRO-1 each replica updates its share of the stage's weights and gathers the others.
        share = plan.stage_parameters(stage) / plan.layout.data_parallel_size
        sent = update_bytes_sent(plan, stage)
        fixed.append(share * probe.update_seconds + sent * COPIES_OF_A_MESSAGE * probe.copy_seconds)
    transfer = MicroBatchTime(seconds_per_sample=stream_bytes(plan) * COPIES_OF_A_MESSAGE * probe.copy_seconds)
    return PipelineCost(tuple(stages), transfer, max(fixed))


def _stage_time(plan: RunPlan, counts: Mapping[str, int], probe: Probe) -> StageTime:
    """Add up the passes of a stage that holds so many of each piece."""
    ranks = plan.layout.tensor_parallel_size
    forward = _sum_of_pieces({name: probe.passes[name].forward for name in counts}, counts, ranks)
    backward = _sum_of_pieces({name: probe.passes[name].backward for name in counts}, counts, ranks)
    # Whole blocks are recomputed around the layers, so the probe has not timed that; half blocks recompute themselves.
    if recomputation(plan.run).whole_blocks:
        again = _sum_of_pieces({BLOCK: probe.passes[BLOCK].forward}, counts, ranks)
        backward = MicroBatchTime(
            backward.seconds + again.seconds, backward.seconds_per_sample + again.seconds_per_sample
        )
    return StageTime(forward, backward)


def _sum_of_pieces(times: Mapping[str, MicroBatchTime], counts: Mapping[str, int], ranks: int) -> MicroBatchTime:
    """Add up so many of each piece, and share the sum evenly among the tensor ranks: a probe times whole layers."""
    return MicroBatchTime(
        sum(counts[name] * time.seconds for name, time in times.items()) / ranks,
        sum(counts[name] * time.seconds_per_sample for name, time in times.items()) / ranks,
    )
