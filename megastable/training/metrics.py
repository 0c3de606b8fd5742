"""Gathers the values of a step in one object, the same for metrics.jsonl, the writers and the terminal."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from megastable.core.batch_rampup import Batch
from megastable.core.clipping import clip_coefficient
from megastable.core.flops import tflops_per_device
from megastable.core.records import StepResult, TrainingState
from megastable.planning.run_plan import RunPlan


@dataclass(frozen=True)
class Evaluation:
    """Holds the validation loss, and those of the sources of a blend."""

    loss: float
    by_source: Mapping[str, float] = field(default_factory=dict)
    """Empty where there is one source."""


@dataclass(frozen=True)
class StepMetrics:
    """Holds the values of one step; ``step`` and the consumed counts are those after it (the first step is 1)."""

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
    data_position: int
    """Position in the order of the samples after the step; ahead of ``consumed_samples`` where some were left out."""
    vetoed: bool = False
    """The update was skipped for standing out from the steps before."""
    eval_loss: float | None = None
    eval_losses: Mapping[str, float] | None = None
    """Of the sources of a blend, by name."""
    monitored: Mapping[str, float] = field(default_factory=dict)
    """What the monitors measured, by name. In files these names stand beside those of the step."""
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
    snapshot_seconds: float | None = None
    """What the copy of the state to which a rollback returns took, where one was taken before the step."""

    @classmethod
    def of(
        cls,
        plan: RunPlan,
        state: TrainingState,
        batch: Batch,
        lr: float,
        result: StepResult,
        evaluation: Evaluation | None = None,
        monitored: Mapping[str, float] | None = None,
        consistency_seconds: float | None = None,
        snapshot_seconds: float | None = None,
    ) -> StepMetrics:
        """Gather the values of the step that led to ``state``; ``monitored`` are those of the monitors."""
        seconds = result.step_seconds
        devices = plan.layout.world_size
        samples = batch.global_batch_size  # this step's, which a ramp changes
        watched: dict[str, Any] = {} if result.watched is None else asdict(result.watched)
        for of_each_rank in RANKS_ALONE:
            watched.pop(of_each_rank, None)
        return cls(
            step=state.step,
            consumed_samples=state.consumed_samples,
            consumed_tokens=state.consumed_tokens,
            global_batch_size=samples,
            micro_batch_size=batch.micro_batch_size,
            num_microbatches=batch.num_microbatches,
            lr=lr,
            loss=result.loss,
            grad_norm=result.grad_norm,
            loss_scale=result.loss_scale,
            skipped=result.skipped,
            step_seconds=seconds,
            tokens_per_second=samples * plan.run.megastable.model.seq_length / seconds,
            tflops_per_device=tflops_per_device(plan.model_flops_per_sample, samples, seconds, devices),
            hardware_tflops_per_device=tflops_per_device(plan.hardware_flops_per_sample, samples, seconds, devices),
            # Of a skipped step nothing was applied, although its norm is finite where only its loss is not.
            clip_coefficient=0.0 if result.skipped else clip_coefficient(result.grad_norm, plan.run.clip_norm),
            skipped_steps=state.skipped_steps,
            data_position=state.data_position,
            vetoed=result.vetoed,
            eval_loss=None if evaluation is None else evaluation.loss,
            eval_losses=None if evaluation is None else dict(evaluation.by_source) or None,
            monitored=monitored or {},
            consistency_seconds=consistency_seconds,
            snapshot_seconds=snapshot_seconds,
            **watched,
        )

    def to_json(self) -> str:
        """Return one line of JSON. A value that is not finite is null, since JSON has no word for it."""
        return json.dumps(finite_or_none(self.given()))

    def given(self) -> dict[str, Any]:
        """Return the values that this step has, those of the monitors among them."""
        values: dict[str, Any] = {}
        # In the order of the fields: loss_volatility stands where it stood when it was a field itself.
        for name, value in asdict(self).items():
            if name == "monitored":
                values.update(value)
            elif value is not None:
                values[name] = value
        return values

    def numbers(self) -> dict[str, float]:
        """Return every number of this step by a path such as ``layers/block_0/grad_norm``."""
        return dict(_numbers(self.given(), ""))


RANKS_ALONE = ("rank_busy_seconds", "rank_host_memory_gib")
"""What of a watched step is for monitors alone: a number for each of thousands of ranks is too much for a line."""
STEP_METRICS = frozenset(metric.name for metric in fields(StepMetrics) if metric.name != "monitored")
"""Names that are in use in metrics.jsonl before any monitor adds its own."""


def _numbers(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _numbers(value, f"{prefix}{name}/")
        elif not isinstance(value, str):  # whether a step was skipped is 0 or 1
            yield f"{prefix}{name}", float(value)


def finite_or_none(value: Any) -> Any:
    """Replace numbers that are not finite by None, in ``value`` itself and in the dictionaries that it holds."""
    if isinstance(value, dict):
        return {name: finite_or_none(inner) for name, inner in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
