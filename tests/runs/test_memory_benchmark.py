"""What `megastable plan` says a device needs, beside what a step of the real engine takes."""

from __future__ import annotations

import pytest
import torch
from memory import case_plan, measured_bytes

from megastable.planning.memory import stage_memory
from tests.support.ranks import run_ranks

CASES = ("fp32", "bf16, fp32 sums, recomputed")


def counted_over_measured(case: str, num_stages: int) -> float:
    """Of this rank."""
    plan = case_plan(case, num_stages, torch.distributed.get_world_size())
    measured, stage = measured_bytes(plan)
    return stage_memory(plan, on_cpu=True)[stage].total / measured


@pytest.mark.parametrize(("case", "num_stages"), [(CASES[0], 1), (CASES[1], 2)], ids=["two replicas", "two stages"])
def test_memory_is_counted_within_a_tenth(case: str, num_stages: int) -> None:
    for ratio in run_ranks(counted_over_measured, world_size=2, case=case, num_stages=num_stages):
        assert ratio == pytest.approx(1.0, abs=0.1)
