"""The bytes of a run's messages and of its gradient buffer, which times and memory share."""

from __future__ import annotations

from typing import Any

import pytest

from megastable.core.devices import Device
from megastable.core.memory import COPIES_CHECK_BYTES, LARGEST_REDUCE_BUCKET, reduce_bucket_elements
from megastable.core.pipeline_cost import MicroBatchTime, StageTime
from megastable.planning.data_sheet_cost import UPDATE_TOUCHES_BYTES, Machine, step_cost
from megastable.planning.measured_cost import COPIES_OF_A_MESSAGE, Probe, probed_cost
from megastable.planning.memory import stage_memory
from megastable.planning.number_formats import communication_bytes, stream_bytes, update_bytes_sent
from tests.unit.planning.plan_examples import plan_of

BF16 = {"bf16__enabled": True}
FP32_SUMS = {**BF16, "data_types__grad_accum_dtype": "fp32"}


@pytest.mark.parametrize(
    ("changes", "gradient", "weight"),
    [
        ({}, 4, 4),
        (BF16, 2, 2),
        (FP32_SUMS, 4, 2),
        ({**FP32_SUMS, "communication_data_type": "bf16"}, 2, 2),
        ({**BF16, "communication_data_type": "fp32"}, 4, 2),
    ],
)
def test_an_update_sends_gradients_twice_and_weights_once(changes: dict[str, Any], gradient: int, weight: int) -> None:
    """Of four replicas, each sends three quarters."""
    plan = plan_of(4, **changes)
    (stage,) = plan.cut.stages
    assert communication_bytes(plan.run) == gradient
    assert stream_bytes(plan) == 16 * 32 * weight
    assert update_bytes_sent(plan, stage) == 0.75 * plan.stage_parameters(stage) * (2 * gradient + weight)
    (alone,) = plan_of(1, **changes).cut.stages
    assert update_bytes_sent(plan_of(1, **changes), alone) == 0


@pytest.mark.parametrize("changes", [{}, FP32_SUMS])
def test_data_sheet_and_probe_send_the_same_bytes(changes: dict[str, Any]) -> None:
    """A second a byte on the link, or half a second for each of the two copies."""
    plan = plan_of(2, **changes)
    (stage,) = plan.cut.stages
    sheet = Device("slow", dict.fromkeys(("fp32", "bf16"), 1.0), 1.0, node_gb_per_second=1e-9)
    nothing = StageTime(MicroBatchTime(), MicroBatchTime())
    probe = Probe(dict.fromkeys(("first", "block", "last"), nothing), 0.0, 1 / COPIES_OF_A_MESSAGE)
    assert step_cost(plan, Machine(sheet, 1.0)).fixed_seconds == pytest.approx(update_bytes_sent(plan, stage))
    assert probed_cost(plan, probe).fixed_seconds == pytest.approx(update_bytes_sent(plan, stage))


def test_the_memorys_speed_bounds_an_update_without_replicas() -> None:
    plan = plan_of()
    (stage,) = plan.cut.stages
    sheet = Device("slow", {"fp32": 1.0}, 1.0, memory_gb_per_second=1e-9)
    expected = plan.stage_parameters(stage) * UPDATE_TOUCHES_BYTES
    assert step_cost(plan, Machine(sheet, 1.0)).fixed_seconds == pytest.approx(expected)


def test_the_gradient_buffer_is_as_large_as_a_small_model_and_no_larger_than_the_default() -> None:
    assert reduce_bucket_elements(None, 1000) == 1000
    assert reduce_bucket_elements(None, 10**9) == LARGEST_REDUCE_BUCKET == 500_000_000
    assert reduce_bucket_elements(70, 1000) == 70


@pytest.mark.parametrize("configured", [None, 70])
def test_the_forecast_counts_the_buffer_that_the_engine_takes(configured: int | None) -> None:
    plan = plan_of(2, zero_optimization__reduce_bucket_size=configured)
    (stage,) = plan.cut.stages
    (use,) = stage_memory(plan, on_cpu=True)
    assert use.buffers - COPIES_CHECK_BYTES == 4 * (configured or plan.stage_parameters(stage))
