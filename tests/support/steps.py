"""Building an engine for a tiny run inside a rank, and stepping it on made-up tokens."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed

from megastable.checkpoints.manifest import read_manifest
from megastable.config import RunConfig
from megastable.config.training import CheckpointConfig
from megastable.core.records import TrainingState
from megastable.engine.checkpoint import RunRecord, load_checkpoint
from megastable.engine.checkpoint_writer import CheckpointWriter
from megastable.engine.device import allow_fp16_on_cpu
from megastable.engine.progress import Progress
from megastable.engine.training_engine import TrainingEngine
from megastable.planning.run_plan import RunPlan
from tests.support.tokens import micro_batches


def build_engine(run: RunConfig, progress: Progress | None = None) -> tuple[RunPlan, TrainingEngine]:
    """Build the real engine of ``run`` on the world of this process."""
    allow_fp16_on_cpu(run)
    plan = RunPlan.of(run, torch.distributed.get_world_size())
    engine = TrainingEngine(run, plan.layout, plan.ramp, Path(tempfile.gettempdir()), progress=progress)
    _let_computation_go_first()
    return plan, engine


def _let_computation_go_first() -> None:
    """Keep the communication threads of gloo from interrupting the ranks that still compute.

    Such a thread polls without a pause while data is there that its rank has not asked for yet. With more ranks than
    cores it takes the time of just those that the others wait for: a sum over four ranks on two cores takes 5 ms, and
    1 ms where these threads wait for their turn. Linux alone can say so for one thread.
    """
    if not hasattr(os, "SCHED_BATCH"):
        return
    for task in Path("/proc/self/task").iterdir():
        # A thread may end while this looks at it.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if (task / "comm").read_text().startswith("gloo_tcp_loop"):
                os.sched_setscheduler(int(task.name), os.SCHED_BATCH, os.sched_param(0))


def save_now(engine: TrainingEngine, checkpoints: Path, state: TrainingState, **record: Any) -> Path:
    """Save the engine's state and return the checkpoint, once it is published."""
    known: dict[str, Any] = {"run": {}, "corpus_fingerprint": "corpus", "monitors": {}, "loss": None, "eval_loss": None}
    writer = CheckpointWriter(checkpoints, engine.model_state, engine.layout, CheckpointConfig(asynchronous=False))
    writer.save(RunRecord(state, **{**known, **record}))
    (outcome,) = writer.outcomes()
    assert outcome.fault is None, outcome.fault
    return outcome.folder


def load(engine: TrainingEngine, checkpoint: Path) -> TrainingState:
    """Bring the engine to where the checkpoint was saved."""
    return load_checkpoint(checkpoint, read_manifest(checkpoint), engine.model_state, engine.layout, seed=1)


def train(
    plan: RunPlan,
    engine: TrainingEngine,
    num_steps: int,
    state: TrainingState | None = None,
    before_step: Callable[[TrainingState], None] = lambda state: None,
    watch: Callable[[TrainingState], bool] = lambda state: False,
) -> tuple[TrainingState, list[dict[str, Any]]]:
    """Take ``num_steps`` steps from ``state``; return the state reached and one dictionary a step."""
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
