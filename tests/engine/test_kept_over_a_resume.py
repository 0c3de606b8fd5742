"""What a resume takes over from the checkpoint and what from the run file: the loss scaler, tied copies, the LR."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from megastable.engine.model_state import SCALER_POSITION, ModelState
from megastable.engine.training_engine import TrainingEngine
from tests.support.ranks import run_ranks
from tests.support.steps import build_engine, load, save_now, train
from tests.support.tiny_run import tiny_run

# The loss scaler


def scales_after_loads(num_runs: int) -> dict[str, bool]:
    """Tell for every part of the position, and for none, whether a run that is resumed without it keeps its scales."""
    kept = {}
    for left_out in ("", *SCALER_POSITION):
        rng = random.Random(5)
        kept[left_out] = all(_scales_go_on(left_out, rng) for _ in range(num_runs))
    return kept


def _scales_go_on(left_out: str, rng: random.Random) -> bool:
    """Compare the scales of an uninterrupted scaler with those of one that is saved and loaded, over random steps."""
    settings = {
        "init_scale": 2.0 ** rng.randint(4, 8),
        "scale_window": rng.randint(1, 4),
        "min_scale": 1.0,
        "delayed_shift": rng.randint(1, 4),  # DeepSpeed's name for the hysteresis
        "consecutive_hysteresis": rng.random() < 0.5,
        "raise_error_at_min_scale": False,
    }
    whole, resumed = _scaler(settings), _scaler(settings)
    overflows = [rng.random() < 0.4 for _ in range(20)]
    cut = rng.randint(1, 12)
    for overflow in overflows[:cut]:
        whole.update_scale(overflow)
    position = _state_of(whole).loss_scaler
    assert position is not None
    if left_out:
        position[left_out] = getattr(resumed, left_out)
    _state_of(resumed).set_counts(0, position)
    scales = []
    for overflow in overflows[cut:]:
        whole.update_scale(overflow)
        resumed.update_scale(overflow)
        scales.append(whole.cur_scale == resumed.cur_scale)
    return all(scales)


def _state_of(scaler: Any) -> ModelState:
    return ModelState(SimpleNamespace(loss_scaler=scaler), [])


def _scaler(settings: dict[str, Any]) -> Any:
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    return DynamicLossScaler(**settings)


def test_every_part_of_the_scalers_position_is_kept_and_needed() -> None:
    (kept,) = run_ranks(scales_after_loads, world_size=1, num_runs=60)
    assert kept.pop(""), "a resumed run has other loss scales"
    assert kept == dict.fromkeys(SCALER_POSITION, False), "a part that could be dropped without a failure here"


FP16 = {"enabled": True, "initial_scale_power": 7, "loss_scale_window": 100, "hysteresis": 3}


def position_after_load(folder: str) -> list[dict[str, Any]]:
    """Save an engine whose scaler stands somewhere special, and load it; returns the position before and after."""
    run = tiny_run(fp16=FP16, megastable__training__fp16_on_cpu=True, megastable__pipeline__num_stages=2)
    plan, engine = build_engine(run)
    state, _ = train(plan, engine, 1)
    scaler = engine.deepspeed.optimizer.loss_scaler
    position = {"cur_scale": 32.0, "cur_iter": 17, "last_overflow_iter": 11, "cur_hysteresis": 2}
    assert position.keys() == set(SCALER_POSITION) and all(hasattr(scaler, name) for name in position)
    vars(scaler).update(position)
    saved = save_now(engine, Path(folder), state)
    _, engine = build_engine(run)
    load(engine, saved)
    return [position, {name: getattr(engine.deepspeed.optimizer.loss_scaler, name) for name in position}]


def test_a_checkpoint_holds_the_scalers_whole_position(tmp_path: Path) -> None:
    for before, after in run_ranks(position_after_load, world_size=2, folder=str(tmp_path)):
        assert after == before


# Tied copies

PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16, fp32 sums": {"fp16": FP16, "data_types": {"grad_accum_dtype": "fp32"}},
}


def tied_copies_over_a_resume(folder: str) -> dict[str, list[Any]]:
    """Look at the tied embedding before a save, after the load, and two steps later, in several precisions."""
    results = {}
    for name, changes in PRECISIONS.items():
        run = tiny_run(megastable__training__fp16_on_cpu=True, megastable__pipeline__num_stages=2, **changes)
        plan, engine = build_engine(run)
        state, _ = train(plan, engine, 2)
        looks = [_tied(engine)]
        saved = save_now(engine, Path(folder) / name, state)
        plan, engine = build_engine(run)
        state = load(engine, saved)
        looks.append(_tied(engine))
        train(plan, engine, 2, state)
        looks.append(_tied(engine))
        results[name] = looks
    return results


def _tied(engine: TrainingEngine) -> dict[str, Any]:
    weight = engine.deepspeed.module.tied_modules["embedding"].weight.detach()
    # Summed with factors, so that a swap of two rows shows as well.
    factors = torch.arange(1, weight.numel() + 1, dtype=torch.float64)
    checksum = float((weight.double().flatten() * factors).sum())
    return {"checksum": checksum, "differences": engine.check_consistency()[0]}


def test_tied_copies_are_equal_after_a_resume_and_stay_equal(tmp_path: Path) -> None:
    first, last = run_ranks(tied_copies_over_a_resume, world_size=2, folder=str(tmp_path))
    for name in PRECISIONS:
        assert first[name] == last[name], name
        assert all(look["differences"] == [] for look in first[name]), name
        saved, loaded, trained = (look["checksum"] for look in first[name])
        assert saved == loaded != trained, name


# The learning rate


def applied_learning_rates(folder: str, schedule: dict[str, Any], peak: float) -> dict[str, list[float]]:
    """Train three steps of a cosine, and go on under another schedule; returns what the update used, and the plan's."""
    earlier, engine = build_engine(tiny_run(megastable__lr_schedule={"type": "cosine", "warmup": 8, "min_lr": 0.001}))
    state, _ = train(earlier, engine, 3)
    saved = save_now(engine, Path(folder), state)
    optimizer = {"type": "AdamW", "params": {"lr": peak}}
    run = tiny_run(megastable__lr_schedule=schedule, optimizer=optimizer, megastable__training__total_steps=20)
    plan, engine = build_engine(run)
    state = load(engine, saved)
    used: list[list[float]] = []
    engine.deepspeed.optimizer.optimizer.register_step_pre_hook(
        lambda optimizer, *_: used.append([group["lr"] for group in optimizer.param_groups])
    )
    planned: list[float] = []
    before: list[float] = []
    samples = state.applied_samples
    for _ in range(4):
        batch = plan.ramp.at(samples)
        planned.append(plan.learning_rate(samples, batch))
        before.append(earlier.learning_rate(samples, batch))
        samples += batch.global_batch_size
    train(plan, engine, 4, state)
    assert all(len(set(rates)) == 1 for rates in used), "a group of parameters with a rate of its own"
    return {"used": [rates[0] for rates in used], "planned": planned, "before": before}


def test_after_a_resume_the_learning_rate_is_that_of_the_schedule_of_now(tmp_path: Path) -> None:
    schedule = {"type": "linear", "warmup": 8, "min_lr": 0.0005}
    (rates,) = run_ranks(applied_learning_rates, world_size=1, folder=str(tmp_path), schedule=schedule, peak=0.004)
    assert rates["used"] == rates["planned"]
    assert all(used != before for used, before in zip(rates["used"], rates["before"], strict=True))
