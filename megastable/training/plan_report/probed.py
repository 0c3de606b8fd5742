"""The cost of a run's steps from what pieces of its model take: a block, and both ends."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megastable.config.stages import model_parts, model_shape
from megastable.core.parameters import stage_parameters
from megastable.core.pipeline_cost import MicroBatchTime, PipelineCost, StageTime
from megastable.training.plan_report.formats import communication_bytes, number_format
from megastable.training.run_plan import RunPlan, recomputation

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
