"""A step of a run's first phase under every shape of schedule, played in the costs that the forecast rests on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megastable.core.batch_rampup import Batch
from megastable.core.errors import UserError
from megastable.core.pipeline_cost import PipelineCost
from megastable.core.pipeline_schedule import StageCosts
from megastable.core.schedule_lists import MemoryLimit
from megastable.core.schedule_shapes import SHAPES, schedule_of
from megastable.core.schedule_simulation import Timeline, play
from megastable.planning.data_sheet_cost import relative_cost
from megastable.planning.forecast import Basis
from megastable.planning.run_plan import RunPlan

WEIGHT_SHARE = 0.33
"""Of a backward pass, that of the weights' gradients: 0.71 of 2.15, measured on a CPU at a hidden size of 512."""
MOST_PASSES = 4_000
"""Of a step, forward and backward on every stage; more can neither be told apart in a picture nor computed at once."""


@dataclass(frozen=True)
class PlannedTimelines:
    """A step of one batch under every shape.

    Attributes:
        in_seconds: False where no device is known, and the times are in units of a step under 1F1B.
    """

    batch: Batch
    timelines: tuple[Timeline, ...]
    in_seconds: bool

    @property
    def assumptions(self) -> list[str]:
        """List, for people, what the times rest on."""
        return [
            "only 1F1B is what a run executes; the other shapes are computed",
            "each shape may hold the activations of 1F1B's first stage, and as many deferred gradients",
            f"{WEIGHT_SHARE:.0%} of a backward pass, recomputation included, is the weights' gradients",
            "each chunk of a V takes half of what a stage does",
            "messages overlap with computing; the update is left out",
        ]


def first_phase_timelines(plan: RunPlan, basis: Basis) -> PlannedTimelines:
    """Play a step of the run's first phase, where the pipeline idles most, under every shape.

    Raises:
        UserError: the step has too many passes.
    """
    batch = plan.phases[0].batch
    num_ranks = plan.layout.num_stages
    num_passes = 2 * num_ranks * batch.num_microbatches
    if num_passes > MOST_PASSES:
        raise UserError(
            f"--timeline: the first phase has {num_ranks} stages x {batch.num_microbatches} micro-batches x 2 = "
            f"{num_passes:,} passes a step, and at most {MOST_PASSES:,} are drawn; set a smaller "
            "megastable.batch_rampup.start or a larger micro-batch"
        )
    cost = basis.cost(plan)
    costs = chunk_costs(relative_cost(plan) if cost is None else cost, batch.micro_batch_size)
    if cost is None:
        costs = in_steps_of_1f1b(costs, num_ranks, batch.num_microbatches)
    timelines = tuple(_played(name, num_ranks, costs, batch.num_microbatches) for name in SHAPES)
    return PlannedTimelines(batch, timelines, in_seconds=cost is not None)


def _played(name: str, num_ranks: int, chunks: StageCosts, num_microbatches: int) -> Timeline:
    num_chunks = SHAPES[name].num_chunks
    costs = chunks if num_chunks == 2 else chunks.joined_in_pairs()
    limit = MemoryLimit(num_chunks * num_ranks, num_chunks * num_ranks)
    return play(schedule_of(name, num_ranks, costs, num_microbatches, limit), costs)


def chunk_costs(cost: PipelineCost, micro_batch_size: int) -> StageCosts:
    """Return the seconds of two equal chunks of every stage."""

    def in_halves(seconds: Iterable[float], share: float = 1.0) -> tuple[float, ...]:
        return tuple(share * stage / 2 for stage in seconds for _ in range(2))

    backward = [stage.backward.at(micro_batch_size) for stage in cost.stages]
    return StageCosts(
        forward=in_halves(stage.forward.at(micro_batch_size) for stage in cost.stages),
        input_backward=in_halves(backward, 1 - WEIGHT_SHARE),
        weight_backward=in_halves(backward, WEIGHT_SHARE),
        transfer=cost.transfer.at(micro_batch_size),
    )


def in_steps_of_1f1b(costs: StageCosts, num_ranks: int, num_microbatches: int) -> StageCosts:
    """Return costs of which a step under 1F1B takes 1."""
    step = _played("1f1b", num_ranks, costs, num_microbatches).step_seconds

    def scaled(times: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(time / step for time in times)

    return StageCosts(
        scaled(costs.forward), scaled(costs.input_backward), scaled(costs.weight_backward), costs.transfer / step
    )
