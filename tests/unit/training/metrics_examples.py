"""Gives metrics of a step, to change for a test."""

import dataclasses
from typing import Any

from megastable.training.metrics import StepMetrics

STEP = StepMetrics(
    step=10,
    consumed_samples=100,
    consumed_tokens=1600,
    global_batch_size=16,
    micro_batch_size=2,
    num_microbatches=4,
    lr=1e-3,
    loss=2.5,
    grad_norm=0.75,
    loss_scale=1.0,
    skipped=False,
    step_seconds=0.5,
    tokens_per_second=512.0,
    tflops_per_device=0.01,
    hardware_tflops_per_device=0.02,
    clip_coefficient=1.0,
    skipped_steps=0,
    data_position=12,
)
NOT_FINITE = (float("nan"), float("inf"), float("-inf"))
# Steps that a display has to survive.
HARD_STEPS: dict[str, dict[str, Any]] = {
    "skipped": {"skipped": True, "grad_norm": float("inf"), "loss_scale": 65536.0},
    "evaluated": {"eval_loss": 2.25},
    "skipped and evaluated": {"skipped": True, "eval_loss": 2.25},
    "loss nan": {"loss": float("nan")},
    "loss inf": {"loss": float("inf"), "grad_norm": float("nan"), "skipped": True},
    "all not finite": {
        name: float("nan")
        for name in ("lr", "loss", "grad_norm", "tokens_per_second", "tflops_per_device", "eval_loss")
    },
    "eval loss inf": {"eval_loss": float("inf")},
    "zero": {"lr": 0.0, "loss": 0.0, "grad_norm": 0.0, "tflops_per_device": 0.0},
    "huge": {"loss": 1e30, "grad_norm": 1e30, "tokens_per_second": 1e12, "loss_scale": 2.0**32},
    "watched": {
        "headroom": 0.5, "headroom_layer": "block_0", "slowest_rank": 1, "slowest_rank_share": 0.75,
        "host_memory_gib": 1.5, "layers": {"block_0": {"grad_norm": 0.5, "max_activation": 3.0}, "head": {}},
    },
    "measured by monitors": {"monitored": {"loss_volatility": 0.125, "own": 3.0}},
    "past the end": {"step": 10**6, "consumed_samples": 10**9},
}  # fmt: skip


def step_metrics(**changes: Any) -> StepMetrics:
    """Return ``STEP`` with changes."""
    return dataclasses.replace(STEP, **changes)
