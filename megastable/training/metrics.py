"""One object a step, the same for metrics.jsonl, the writers and the terminal."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from megastable.core.batch_rampup import Batch
from megastable.core.clipping import clip_coefficient
from megastable.core.flops import tflops_per_device
from megastable.core.records import StepResult, TrainingState
from megastable.planning.run_plan import RunPlan


@dataclass(frozen=True)
class StepMetrics:
    """The values of one step; ``step`` and the consumed counts are those after it (the first step is 1)."""

    step: int
    consumed_samples: int
    consumed_tokens: int
    global_batch_size: int
    micro_batch_size: int
    num_microbatches: int
    lr: float
    loss: float
    grad_norm: float
    loss_scale: float
    skipped: bool
    step_seconds: float
    tokens_per_second: float
    tflops_per_device: float
    """By the operations that the model needs."""
    hardware_tflops_per_device: float
    """By the operations that are executed, recomputation and padding included."""
    clip_coefficient: float
    """What clipping multiplied the gradient by; 1 where it did nothing."""
    skipped_steps: int
    """So far."""
    eval_loss: float | None = None
    loss_volatility: float | None = None
    """Robust standard deviation of the loss from step to step."""
    headroom: float | None = None
    """This and the rest only on watched steps, see ``core.records.Watched``."""
    headroom_layer: str | None = None
    slowest_rank: int | None = None
    slowest_rank_share: float | None = None
    stage_busy_seconds: dict[str, float] | None = None
    host_memory_gib: float | None = None
    device_memory_gib: float | None = None
    layers: dict[str, dict[str, float]] | None = None
    consistency_seconds: float | None = None
    """What the comparison of copies took, where it was made."""

    @classmethod
    def of(
        cls,
        plan: RunPlan,
        state: TrainingState,
        batch: Batch,
        lr: float,
        result: StepResult,
        eval_loss: float | None = None,
        monitored: Mapping[str, float] | None = None,
        consistency_seconds: float | None = None,
    ) -> StepMetrics:
        """Gather the values of the step that led to ``state``; ``monitored`` are those of the monitors."""
        seconds, devices = result.step_seconds, plan.layout.world_size
        extra: dict[str, Any] = {**(monitored or {}), **(asdict(result.watched) if result.watched else {})}
        tokens = batch.global_batch_size * plan.run.megastable.model.seq_length
        return cls(
            step=state.step,
            consumed_samples=state.consumed_samples,
            consumed_tokens=state.consumed_tokens,
            global_batch_size=batch.global_batch_size,
            micro_batch_size=batch.micro_batch_size,
            num_microbatches=batch.num_microbatches,
            lr=lr,
            loss=result.loss,
            grad_norm=result.grad_norm,
            loss_scale=result.loss_scale,
            skipped=result.skipped,
            step_seconds=seconds,
            tokens_per_second=tokens / seconds,
            tflops_per_device=tflops_per_device(plan.model_flops_per_sample, batch.global_batch_size, seconds, devices),
            hardware_tflops_per_device=tflops_per_device(
                plan.hardware_flops_per_sample, batch.global_batch_size, seconds, devices
            ),
            clip_coefficient=clip_coefficient(result.grad_norm, plan.run.clip_norm),
            skipped_steps=state.skipped_steps,
            eval_loss=eval_loss,
            consistency_seconds=consistency_seconds,
            **extra,
        )

    def to_json(self) -> str:
        """One line of JSON. A value that is not finite is null, since JSON has no word for it."""
        return json.dumps(finite_or_none(self.given()))

    def given(self) -> dict[str, Any]:
        """The values that this step has."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def numbers(self) -> dict[str, float]:
        """Every number of this step by a path such as ``layers/block_0/grad_norm``."""
        return dict(_numbers(self.given(), ""))


def _numbers(values: dict[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _numbers(value, f"{prefix}{name}/")
        elif not isinstance(value, str):
            yield f"{prefix}{name}", float(value)


def finite_or_none(value: Any) -> Any:
    """``value``, and in dictionaries what they hold, with None for numbers that JSON has no word for."""
    if isinstance(value, dict):
        return {name: finite_or_none(inner) for name, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
