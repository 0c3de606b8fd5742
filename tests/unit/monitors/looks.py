"""Steps that were watched, as the monitors of layers and ranks see them."""

from __future__ import annotations

from typing import Any

from megastable.core.batch_rampup import Batch
from megastable.core.records import StepResult, TrainingState, Watched
from megastable.monitors.monitor import Seen
from megastable.planning.run_plan import RunPlan
from tests.support.tiny_run import tiny_run


def plan_of(world_size: int = 1, **changes: Any) -> RunPlan:
    """Plan the tiny run with changes."""
    return RunPlan.of(tiny_run(**changes), world_size)


def look(
    layers: dict[str, dict[str, float]] | None = None,
    busy: tuple[float, ...] = (1.0,),
    memory: tuple[float, ...] = (1.0,),
    learning_rate: float = 0.004,
) -> Seen:
    """Return a watched step."""
    layers = layers or {"block_0": {"max_activation": 1.0}}
    watched = Watched(layers, 0.1, next(iter(layers)), 0, 0.5, {"stage_0": 0.5}, max(memory), None, busy, memory)
    result = StepResult(5.0, 1.0, 1.0, False, 1.0, watched)
    return Seen(TrainingState(step=1, consumed_samples=4), Batch(4, 1, 4), learning_rate, result)
