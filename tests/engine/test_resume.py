"""A resumed run goes on with the very same bits: every precision, mid-ramp, with dropout, after skipped steps."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch.distributed

from megastable.checkpoints.folder import folder_name, newest_complete
from megastable.core.records import TrainingState
from megastable.engine.training_engine import TrainingEngine
from megastable.planning.run_plan import RunPlan
from tests.support.ranks import run_ranks
from tests.support.steps import build_engine, load, save_now, train
from tests.support.tiny_run import tiny_run
from tests.support.tokens import micro_batches

COMMON: dict[str, Any] = {
    "megastable__model__dropout": 0.1,
    "megastable__training__fp16_on_cpu": True,
    "megastable__batch_rampup": {"steps": [[0, 4], [16, 8], [40, 16]], "micro_batch_size_steps": [[16, 2]]},
}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "bf16, fp32 sums": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
    # Overflows at first, grows later: skips and both directions of the scale lie before and after the save.
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 20, "loss_scale_window": 2, "hysteresis": 1}},
    "fp16, fp32 sums, recomputed": {
        "fp16": {"enabled": True, "initial_scale_power": 10, "loss_scale_window": 3},
        "data_types": {"grad_accum_dtype": "fp32"},
        "megastable__pipeline__activation_checkpointing": True,
    },
}
SAVE_AT, NUM_STEPS = 5, 9  # step 5 lies within the phase of batch 8


def _values(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows without the one value that is never the same."""
    return [{key: value for key, value in row.items() if key != "step_seconds"} for row in rows]


def undisturbed_continued_and_resumed(num_stages: int, folder: str) -> dict[str, Any]:
    """Save a run in every precision; go on, and again from the files in a new engine, and all without a save.

    On one replica alone is there a run without a save: what a save might disturb has nothing to do with replicas.
    """
    results = {}
    for name, changes in PRECISIONS.items():
        run = tiny_run(**COMMON, **changes, megastable__pipeline__num_stages=num_stages)
        plan, engine = build_engine(run)
        state, first = train(plan, engine, SAVE_AT)
        checkpoints = Path(folder) / name
        published = save_now(engine, checkpoints, state)
        assert newest_complete(checkpoints, warn=print) == published == checkpoints / folder_name(SAVE_AT)
        assert not (checkpoints / "latest").exists()
        continued = train(plan, engine, NUM_STEPS - SAVE_AT, state)[1]

        plan, engine = build_engine(run)
        torch.manual_seed(99)  # a resumed process does not come with the right random state by chance
        loaded = load(engine, published)
        assert loaded == state
        resumed = train(plan, engine, NUM_STEPS - SAVE_AT, loaded)[1]
        results[name] = {"continued": _values(first + continued), "resumed": _values(first + resumed)}
        if plan.layout.data_parallel_size == 1:
            results[name]["undisturbed"] = _values(train(*build_engine(run), NUM_STEPS)[1])
    return results


@pytest.mark.parametrize(("world_size", "num_stages"), [(2, 2), (4, 2)])
def test_losses_are_bit_equal_after_a_resume(tmp_path: Path, world_size: int, num_stages: int) -> None:
    for results in run_ranks(
        undisturbed_continued_and_resumed, world_size, num_stages=num_stages, folder=str(tmp_path)
    ):
        for name, rows in results.items():
            assert rows["resumed"] == rows["continued"], name
            assert world_size > num_stages or rows["continued"] == rows["undisturbed"], f"{name}: disturbed by the save"
        assert any(row["skipped"] for row in results["fp16"]["continued"][:SAVE_AT])
        scales = [row["loss_scale"] for row in results["fp16"]["continued"]]
        assert any(after > before for before, after in itertools.pairwise(scales)), "never grew"


def evaluated_and_not() -> dict[str, Any]:
    """Train with and without evaluations in between, in bf16 with dropout and a growing micro-batch."""
    results = {}
    for evaluates in (False, True):
        run = tiny_run(**COMMON, bf16={"enabled": True}, megastable__pipeline__num_stages=2)
        plan, engine = build_engine(run)
        losses: list[list[float]] = []
        evaluate = functools.partial(_evaluate_twice, plan, engine, losses) if evaluates else lambda state: None
        rows = train(plan, engine, 6, before_step=evaluate)[1]
        results[str(evaluates)] = {"rows": _values(rows), "losses": losses}
    return results


def _evaluate_twice(plan: RunPlan, engine: TrainingEngine, losses: list[list[float]], state: TrainingState) -> None:
    """Append the losses of two evaluations of the same batch, before each step but the first."""
    if state.step > 0:
        size = plan.run.megastable.model
        last_batch = plan.ramp.at(state.consumed_samples - 1)
        data = list(micro_batches(last_batch, 10_000, engine.replica, 1, size.seq_length, size.vocab_size))
        losses.append([engine.evaluate(iter(data), len(data)) for _ in range(2)])


def test_evaluation_leaves_training_bit_identical() -> None:
    for results in run_ranks(evaluated_and_not, world_size=2):
        assert results["True"]["rows"] == results["False"]["rows"]
        evaluations = results["True"]["losses"]
        assert len(evaluations) == 5
        assert all(first == second for first, second in evaluations), "dropout was on in an evaluation"
        assert evaluations[-1] != evaluations[0], "an evaluation did not see the trained weights"


def settings_after_load(folder: str) -> dict[str, Any]:
    """Save under one set of optimizer settings, load under another."""
    fp16 = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2, "min_loss_scale": 1}
    common = {"megastable__pipeline__num_stages": 2, "megastable__training__fp16_on_cpu": True}
    plan, engine = build_engine(tiny_run(**common, fp16=fp16, gradient_clipping=0.5))
    state, _ = train(plan, engine, 4)
    saved = save_now(engine, Path(folder), state)
    scale = engine.deepspeed.optimizer.loss_scale

    optimizer = {"type": "AdamW", "params": {"lr": 0.01, "betas": [0.8, 0.9], "weight_decay": 0.3}}
    changed = {**fp16, "initial_scale_power": 4, "loss_scale_window": 77, "min_loss_scale": 8}
    _, engine = build_engine(tiny_run(**common, fp16=changed, gradient_clipping=0.25, optimizer=optimizer))
    load(engine, saved)
    loaded = engine.deepspeed.optimizer
    return {
        "clip": loaded.clip_grad,
        "window": loaded.loss_scaler.scale_window,
        "min": loaded.loss_scaler.min_scale,
        "scale_kept": loaded.loss_scale == scale,
        "scale_grew": scale > 2**8,
        "betas": list(loaded.param_groups[0]["betas"]),
        "decay": [group["weight_decay"] for group in loaded.param_groups],
    }


def test_a_load_leaves_the_configured_settings_in_force(tmp_path: Path) -> None:
    for settings in run_ranks(settings_after_load, world_size=2, folder=str(tmp_path)):
        assert settings == {
            "clip": 0.25, "window": 77, "min": 8, "scale_kept": True, "scale_grew": True,
            "betas": [0.8, 0.9], "decay": [0.3, 0.0],
        }  # fmt: skip
