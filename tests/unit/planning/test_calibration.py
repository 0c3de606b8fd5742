"""Calibration files: what is written is read, and another run's times are refused with the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megastable.core.errors import UserError
from megastable.planning.calibration import TIMED_KEYS, load_calibration, read_calibration_file, timed_keys
from megastable.planning.forecast import forecast
from tests.unit.planning.calibration_examples import cost_of_stages, file_of
from tests.unit.planning.plan_examples import plan_of

TWO_STAGES = {"megastable__pipeline__num_stages": 2}
OTHER_RUNS: dict[str, dict[str, Any]] = {
    "megastable.model.hidden_size": {"megastable__model__hidden_size": 64},
    "megastable.model.attention": {"megastable__model__attention": "math"},
    "megastable.pipeline.num_stages": {"megastable__pipeline__num_stages": 4},
    "megastable.pipeline.activation_checkpointing": {"megastable__pipeline__activation_checkpointing": True},
    "megastable.tensor_parallel.size": {"megastable__tensor_parallel__size": 2},
    "megastable.training.loss_chunk_tokens": {"megastable__training__loss_chunk_tokens": 8},
    "bf16.enabled": {"bf16__enabled": True},
    "fp16.enabled": {"fp16__enabled": True, "megastable__training__fp16_on_cpu": True},
    "data_types.grad_accum_dtype": {"bf16__enabled": True, "data_types__grad_accum_dtype": "fp32"},
}
"""Key -> a run that differs in it."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Write a file that fits the tiny run on two stages."""
    file_of(plan_of(2, **TWO_STAGES)).write(tmp_path / "sweep.json")
    return tmp_path / "sweep.json"


def refusal(path: Path, **changes: Any) -> str:
    """Return the message with which a file is refused."""
    run = {**TWO_STAGES, **changes}
    world_size = run["megastable__pipeline__num_stages"] * run.get("megastable__tensor_parallel__size", 1)
    with pytest.raises(UserError) as caught:
        load_calibration(path, plan_of(world_size, **run))
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_what_is_written_is_read(path: Path) -> None:
    found = load_calibration(path, plan_of(2, **TWO_STAGES))
    assert found.cost == cost_of_stages(2)
    assert found.usable_bytes == 2 * 2**30
    assert found.on_cpu
    assert all(word in found.source for word in (str(path), "a sweep", "a machine"))


@pytest.mark.parametrize("key", OTHER_RUNS)
def test_another_runs_times_are_refused_with_the_key(path: Path, key: str) -> None:
    assert f"{key}: measured with " in refusal(path, **OTHER_RUNS[key])


def test_every_key_that_times_depend_on_is_tried() -> None:
    for key in TIMED_KEYS:
        assert any(f"{other}.".startswith(f"{key}.") for other in OTHER_RUNS), key
    every_key_set = plan_of(megastable__training__loss_chunk_tokens=8).run
    assert None not in timed_keys(every_key_set).values()


@pytest.mark.parametrize(
    "changes",
    [
        {"megastable__training__seed": 8},
        {"optimizer__params__lr": 0.5},
        {"megastable__batch_rampup": {"final": 40}},
        {"train_micro_batch_size_per_gpu": 2},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_times_do_not_depend_on_may_differ(path: Path, changes: dict[str, Any]) -> None:
    assert load_calibration(path, plan_of(2, **TWO_STAGES, **changes)).cost == cost_of_stages(2)


def test_more_replicas_are_explained(path: Path) -> None:
    assert "instead of" not in load_calibration(path, plan_of(2, **TWO_STAGES)).source
    assert "1 replica(s) instead of 2" in load_calibration(path, plan_of(4, **TWO_STAGES)).source


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is not JSON"),
        ("[]", "is no calibration file"),
        ('{"total_steps": 3}', "is no calibration file"),
        ('{"format": "megastable calibration", "version": 2}', "version 2 of the format"),
        ('{"format": "megastable calibration", "version": 1}', "method"),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    assert says in refusal(path)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    assert "cannot be read" in refusal(tmp_path / "missing.json")


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (("cost", "fixed_seconds"), -1.0),
        (("cost", "fixed_seconds"), "slow"),
        (("cost", "stages"), []),
        (("cost", "stages", 0, "forward", "seconds_per_sample"), -0.1),
        (("memory_gib_per_process",), 0),
        (("method",), "guess"),
        (("surprise",), 1),
    ],
)
def test_a_fault_inside_a_file_is_named(path: Path, keys: tuple[str | int, ...], value: object) -> None:
    values = json.loads(path.read_text())
    section = values
    for key in keys[:-1]:
        section = section[key]
    section[keys[-1]] = value
    path.write_text(json.dumps(values))
    assert str(keys[0]) in refusal(path)


def test_nothing_is_written_over(path: Path) -> None:
    before = path.read_bytes()
    with pytest.raises(UserError, match="exists already"):
        read_calibration_file(path).write(path)
    assert path.read_bytes() == before
    with pytest.raises(UserError, match="does not exist"):
        read_calibration_file(path).write(path.parent / "nowhere" / "sweep.json")


def test_a_forecast_takes_the_times_and_the_memory_of_the_calibration(path: Path) -> None:
    plan = plan_of(2, **TWO_STAGES)
    found = load_calibration(path, plan)
    result = forecast(plan, None, found)
    for entry in result.phases:
        batch = entry.phase.batch
        assert entry.speed is not None
        assert entry.speed.step_seconds == found.cost.step_seconds(batch.micro_batch_size, batch.num_microbatches)
    assert result.fits is True
    assert result.as_dict()["calibration"] == found.source
    assert forecast(plan, None).fits is None
