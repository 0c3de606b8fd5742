"""The cost of a plan's steps from what a block and the ends of the model take; the sizes to measure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megastable.core.pipeline_cost import MicroBatchTime, PipelineCost, StageTime
from megastable.planning.measured_cost import (
    BLOCK,
    FIRST,
    LAST,
    Probe,
    mean_probe,
    planned_sizes,
    probed_cost,
    probed_sizes,
)
from tests.unit.planning.plan_examples import plan_of


def line(seconds: float) -> MicroBatchTime:
    """Build a line with a cost whatever the size, and ten times it a sample."""
    return MicroBatchTime(seconds, 10 * seconds)


PROBE = Probe(
    passes={
        FIRST: StageTime(line(1), line(2)),
        BLOCK: StageTime(line(100), line(200)),
        LAST: StageTime(line(10_000), line(20_000)),
    },
    update_seconds=0.5,
    copy_seconds=0.25,
)


def cost(world_size: int, **changes: Any) -> PipelineCost:
    """Return the cost of the tiny run, which has four blocks."""
    return probed_cost(plan_of(world_size, **changes), PROBE)


def test_every_stage_has_its_blocks_and_its_ends() -> None:
    """Three stages of four blocks: 2, 1 and 1."""
    stages = cost(3, megastable__pipeline__num_stages=3, megastable__pipeline__partition=[2, 1, 1]).stages
    assert [stage.forward for stage in stages] == [line(201), line(100), line(10_100)]
    assert [stage.backward for stage in stages] == [line(402), line(200), line(20_200)]
    (alone,) = cost(1).stages
    assert alone.forward == line(10_401)


def test_recomputed_blocks_are_computed_once_more() -> None:
    (stage,) = cost(1, megastable__pipeline__activation_checkpointing=True).stages
    assert stage.forward == line(10_401)
    assert stage.backward == line(20_802 + 400)


def test_tensor_ranks_share_the_work() -> None:
    (stage,) = cost(2, megastable__tensor_parallel__size=2).stages
    assert stage.forward == line(10_401 / 2)


def test_the_update_is_shared_by_replicas_which_sum_their_gradients() -> None:
    alone, shared = cost(1), probed_cost(plan_of(2), replace(PROBE, copy_seconds=0.0))
    assert shared.fixed_seconds == alone.fixed_seconds / 2
    assert cost(2).fixed_seconds > shared.fixed_seconds


def test_a_message_is_copied_in_and_out() -> None:
    """16 tokens of hidden size 32, 4 bytes each; 2 in 16 bits."""
    assert cost(1).transfer == MicroBatchTime(seconds_per_sample=16 * 32 * 4 * 2 * 0.25)
    assert cost(1, bf16__enabled=True).transfer == MicroBatchTime(seconds_per_sample=16 * 32 * 2 * 2 * 0.25)


def test_the_mean_of_several_processes() -> None:
    faster = Probe({name: StageTime(line(0), line(0)) for name in PROBE.passes}, 0.0, 0.0)
    mean = mean_probe([PROBE, faster])
    assert mean.passes[BLOCK] == StageTime(line(50), line(100))
    assert (mean.update_seconds, mean.copy_seconds) == (0.25, 0.125)


@pytest.mark.parametrize(
    ("planned", "probed"), [({1}, [1, 2]), ({2}, [1, 2]), ({8}, [4, 8]), ({3}, [1, 3]), ({2, 4}, [2, 4])]
)
def test_there_is_always_a_line_to_draw(planned: set[int], probed: list[int]) -> None:
    assert probed_sizes(planned) == probed


def test_sizes_that_are_to_be_chosen_are_measured_over_a_spread() -> None:
    auto: dict[str, Any] = {"micro_batch_size": "auto", "calibration": "to_come.json"}
    plan = plan_of(**{f"megastable__batch_rampup__{key}": value for key, value in auto.items()})
    assert len(planned_sizes(plan)) > 2
    assert planned_sizes(plan_of(train_micro_batch_size_per_gpu=2)) == {2}
