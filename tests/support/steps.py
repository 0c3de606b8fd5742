"""Building an engine for a tiny run inside a rank, and stepping it on made-up tokens."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed

from megastable.config import RunConfig
from megastable.core.records import TrainingState
from megastable.engine.device import allow_fp16_on_cpu
from megastable.engine.training_engine import TrainingEngine
from megastable.planning.run_plan import RunPlan
from tests.support.tokens import micro_batches


def build_engine(run: RunConfig) -> tuple[RunPlan, TrainingEngine]:
    """The real engine of ``run`` on the world of this process."""
    allow_fp16_on_cpu(run)
    plan = RunPlan.of(run, torch.distributed.get_world_size())
    return plan, TrainingEngine(run, plan.layout, plan.ramp, Path(tempfile.gettempdir()))


def train(
    plan: RunPlan,
    engine: TrainingEngine,
    num_steps: int,
    state: TrainingState | None = None,
    before_step: Callable[[TrainingState], None] = lambda state: None,
    watch: Callable[[TrainingState], bool] = lambda state: False,
) -> tuple[TrainingState, list[dict[str, Any]]]:
    """``num_steps`` steps from ``state``; returns the state reached and one dictionary a step."""
    state, rows = state or TrainingState(), []
    model = plan.run.megastable.model
    for _ in range(num_steps):
        before_step(state)
        batch = engine.rampup_hook.before_step(state.consumed_samples)
        lr = plan.learning_rate(state.applied_samples, batch)
        data = micro_batches(
            batch, state.consumed_samples, engine.replica, plan.layout.data_parallel_size,
            model.seq_length, model.vocab_size,
        )  # fmt: skip
        result = engine.train_batch(data if engine.needs_data else None, lr, watch(state))
        state = state.advance(batch, result, model.seq_length)
        rows.append({**asdict(result), **asdict(batch), "lr": lr})
    return state, rows
