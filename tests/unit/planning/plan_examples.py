"""Plans of the tiny run."""

from typing import Any

from megastable.planning.run_plan import RunPlan
from tests.support.tiny_run import tiny_run


def plan_of(world_size: int = 1, **changes: Any) -> RunPlan:
    """Plan the tiny run with changes."""
    return RunPlan.of(tiny_run(**changes), world_size)


def sample_of_step(plan: RunPlan, step: int) -> int:
    """Count the samples that are consumed before ``step``."""
    phase = [phase for phase in plan.phases if phase.first_step <= step][-1]
    return phase.first_sample + (step - phase.first_step) * phase.batch.global_batch_size
