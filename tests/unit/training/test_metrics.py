"""The one object a step that every sink is fed from."""

import json
import math
from dataclasses import asdict, fields
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.core.flops import tflops_per_device
from megastable.core.records import StepResult, TrainingState
from megastable.planning.run_plan import RunPlan
from megastable.training.metrics import STEP_METRICS, Evaluation, StepMetrics
from tests.support.tiny_run import tiny_run
from tests.unit.training.metrics_examples import HARD_STEPS, NOT_FINITE, step_metrics

quick = settings(max_examples=25, deadline=None)  # no deadline: the machine may be busy
ASKED_FOR = {
    "step", "consumed_samples", "consumed_tokens", "global_batch_size", "micro_batch_size", "num_microbatches", "lr",
    "loss", "grad_norm", "loss_scale", "skipped", "step_seconds", "tokens_per_second", "tflops_per_device",
}  # fmt: skip


def refuse(word: str) -> None:
    """Refuse NaN and Infinity, for which JSON has no word; Python's parser takes them all the same."""
    raise AssertionError(f"{word} is no JSON")


def parse(text: str) -> dict[str, Any]:
    """Parse a line strictly."""
    return json.loads(text, parse_constant=refuse)


def test_every_key_that_scripts_rely_on() -> None:
    assert parse(step_metrics().to_json()).keys() >= ASKED_FOR
    assert "eval_loss" not in parse(step_metrics().to_json())
    assert parse(step_metrics(eval_loss=2.25).to_json())["eval_loss"] == 2.25


NUMBERS = [field.name for field in fields(StepMetrics) if field.name in STEP_METRICS and "float" in str(field.type)]


@pytest.mark.parametrize("name", [*NUMBERS, "loss_volatility"])
@pytest.mark.parametrize("value", NOT_FINITE)
def test_a_value_that_is_not_finite_is_null(name: str, value: float) -> None:
    changes = {name: value} if name in STEP_METRICS else {"monitored": {name: value}}
    row = parse(step_metrics(**changes).to_json())
    assert row[name] is None
    assert row.keys() >= ASKED_FOR | {name}


def test_what_monitors_measure_stands_beside_the_metrics_of_the_step() -> None:
    metrics = step_metrics(eval_loss=2.25, monitored={"loss_volatility": 0.5, "own": 3.0}, headroom=0.25)
    row = parse(metrics.to_json())
    assert list(row)[-4:] == ["eval_loss", "loss_volatility", "own", "headroom"]
    assert (row["loss_volatility"], row["own"]) == (0.5, 3.0)
    assert metrics.numbers()["own"] == 3.0
    assert row.keys() - STEP_METRICS == {"loss_volatility", "own"}


def test_numbers_have_paths_and_nothing_else_is_one() -> None:
    numbers = step_metrics(**HARD_STEPS["watched"]).numbers()
    assert numbers["layers/block_0/max_activation"] == 3.0
    assert numbers["headroom"] == 0.5 and "headroom_layer" not in numbers and "eval_loss" not in numbers


@pytest.mark.parametrize("changes", HARD_STEPS.values(), ids=HARD_STEPS)
def test_a_line_gives_back_the_values(changes: dict[str, Any]) -> None:
    metrics = step_metrics(**changes)
    text = metrics.to_json()
    assert "\n" not in text
    values = asdict(metrics)
    values.update(values.pop("monitored"))
    expected = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
        if value is not None
    }
    assert parse(text) == expected
    assert parse(text)["skipped"] is metrics.skipped


@quick
@given(
    consumed=st.integers(0, 60),
    seconds=st.floats(1e-3, 1e3),
    skipped=st.booleans(),
    eval_loss=st.none() | st.floats(0, 20),
    replicas=st.sampled_from([1, 2, 4]),
)
def test_values_of_a_step(consumed: int, seconds: float, skipped: bool, eval_loss: float | None, replicas: int) -> None:
    plan = RunPlan.of(tiny_run(), replicas)
    batch = plan.ramp.at(consumed)
    result = StepResult(loss=2.0, grad_norm=3.0, loss_scale=8.0, skipped=skipped, step_seconds=seconds)
    state = TrainingState(step=4, consumed_samples=consumed).advance(batch, result, seq_length=16)
    metrics = StepMetrics.of(plan, state, batch, 0.005, result, None if eval_loss is None else Evaluation(eval_loss))

    assert (metrics.step, metrics.consumed_samples) == (5, consumed + batch.global_batch_size)
    assert metrics.micro_batch_size * metrics.num_microbatches * replicas == metrics.global_batch_size
    assert metrics.global_batch_size == batch.global_batch_size
    assert (metrics.loss, metrics.grad_norm, metrics.loss_scale) == (2.0, 3.0, 8.0)
    assert (metrics.lr, metrics.skipped, metrics.eval_loss) == (0.005, skipped, eval_loss)
    assert (metrics.step_seconds, metrics.consumed_tokens) == (seconds, 16 * batch.global_batch_size)
    # By the batch of this step, all micro-batches and replicas of it (known failure H6).
    assert metrics.tokens_per_second == pytest.approx(batch.global_batch_size * 16 / seconds)
    for flops, seen in [
        (plan.model_flops_per_sample, metrics.tflops_per_device),
        (plan.hardware_flops_per_sample, metrics.hardware_tflops_per_device),
    ]:
        assert seen == tflops_per_device(flops, batch.global_batch_size, seconds, num_devices=replicas)
