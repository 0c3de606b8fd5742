"""One object a step, the same for metrics.jsonl, the writers and the terminal."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass

from megastable.core.batch_rampup import Batch
from megastable.core.flops import tflops_per_device
from megastable.core.records import StepResult, TrainingState
from megastable.training.run_plan import RunPlan


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
    eval_loss: float | None = None

    @classmethod
    def of(
        cls, plan: RunPlan, state: TrainingState, batch: Batch, lr: float, result: StepResult, eval_loss: float | None
    ) -> StepMetrics:
        """Gather the values of the step that led to ``state``."""
        seconds, devices = result.step_seconds, plan.layout.world_size
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
            eval_loss=eval_loss,
        )

    def to_json(self) -> str:
        """One line of JSON. A value that is not finite is null, since JSON has no word for it."""
        values = {name: value for name, value in asdict(self).items() if name != "eval_loss" or value is not None}
        return json.dumps({name: _finite_or_none(value) for name, value in values.items()})


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None
