"""fp16 and bf16 on one GPU, through the real engine and NCCL, follow fp32 on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.ranks import run_ranks
from tests.support.reference import train_reference
from tests.support.steps import build_engine, train
from tests.support.tiny_run import tiny_run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU"),
]

NUM_STEPS = 8
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 7}},
    "bf16": {"bf16": {"enabled": True}},
}


def steps_on_the_gpu() -> dict[str, Any]:
    """Rows of every precision, and where its weights lay in which format."""
    results = {}
    for name, changes in PRECISIONS.items():
        plan, engine = build_engine(tiny_run(**changes))
        rows = train(plan, engine, NUM_STEPS)[1]
        weights = list(engine.deepspeed.module.parameters())
        results[name] = {
            "rows": rows,
            "devices": sorted({weight.device.type for weight in weights}),
            "dtypes": sorted({str(weight.dtype) for weight in weights}),
        }
    return results


@pytest.fixture(scope="module")
def trained() -> dict[str, Any]:
    return run_ranks(steps_on_the_gpu, world_size=1, accelerator="cuda")[0]


@pytest.mark.parametrize(
    ("name", "dtype", "tolerance"), [("fp16", "torch.float16", 3e-3), ("bf16", "torch.bfloat16", 2e-2)]
)
def test_sixteen_bits_on_a_gpu_follow_fp32(trained: dict[str, Any], name: str, dtype: str, tolerance: float) -> None:
    result, (expected, _) = trained[name], train_reference(tiny_run(), NUM_STEPS)
    assert (result["devices"], result["dtypes"]) == (["cuda"], [dtype])
    rows = result["rows"]
    assert not any(row["skipped"] for row in rows)
    assert [row["loss"] for row in rows] == pytest.approx([step.loss for step in expected], rel=tolerance)
    assert [row["grad_norm"] for row in rows] == pytest.approx([step.grad_norm for step in expected], rel=3 * tolerance)
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.1, "nothing was learned"
