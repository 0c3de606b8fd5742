"""The frozen records that the loop passes to the monitors, the metrics and the checkpoints."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from megastable.core.batch_rampup import Batch


@dataclass(frozen=True)
class Watched:
    """What was measured on every layer and rank during one watched step; the same on every rank."""

    layers: dict[str, dict[str, float]]
    """Layer name to its values: norms of the unclipped gradient, the weights before the update and the update,
    ``update_ratio``, ``grad_zero_share``, ``max_activation`` and, of blocks, ``max_attention_logit``. A skipped step
    has activations only."""
    headroom: float
    """Largest share of the number format's maximum that an activation or attention logit reached."""
    headroom_layer: str
    slowest_rank: int
    slowest_rank_share: float
    """Share of the step that this rank, the busiest, spent in its forward and backward passes."""
    stage_busy_seconds: dict[str, float]
    """Stage name (``stage_0`` …) to the seconds that its ranks spent in their passes, on average."""
    host_memory_gib: float
    """Memory of the process that holds most."""
    device_memory_gib: float | None
    """Highest use so far of the device that was used most; None on a CPU."""


@dataclass(frozen=True)
class Event:
    """What a monitor reports of a step; one line of ``events.jsonl``."""

    step: int
    consumed_samples: int
    kind: str
    text: str
    data: dict[str, Any]


@dataclass(frozen=True)
class StepResult:
    """The outcome of one optimizer step; every value but the seconds is the same on every rank."""

    loss: float
    """Token mean over the global batch."""
    grad_norm: float
    """Global 2-norm of the unscaled gradients before clipping; inf where one of them is not finite."""
    loss_scale: float
    """The scale that this step's loss was multiplied by."""
    skipped: bool
    """True where the update was not applied: a gradient or the loss was not finite, or there was nothing to learn."""
    step_seconds: float
    watched: Watched | None = None
    """None where the step was not watched."""
    asked_to_stop: bool = False
    """True where a rank had been asked to stop before the end of the step."""


@dataclass(frozen=True)
class TrainingState:
    """Counts how far a run has come. With weights, optimizer and RNGs, this is all that a checkpoint needs."""

    step: int = 0
    consumed_samples: int = 0
    """Position in the data and on the batch ramp; skipped steps move it too."""
    applied_samples: int = 0
    """Samples of applied updates: the clock of the learning rate, which a skipped step leaves alone."""
    consumed_tokens: int = 0
    skipped_steps: int = 0

    def advance(self, batch: Batch, result: StepResult, seq_length: int) -> TrainingState:
        """Return the state after a step on ``batch``."""
        # A skipped step uses up its samples, or it would meet the same ones again, but it trains on none.
        applied_now = 0 if result.skipped else batch.global_batch_size
        return TrainingState(
            step=self.step + 1,
            consumed_samples=self.consumed_samples + batch.global_batch_size,
            applied_samples=self.applied_samples + applied_now,
            consumed_tokens=self.consumed_tokens + batch.global_batch_size * seq_length,
            skipped_steps=self.skipped_steps + result.skipped,
        )

    def to_dict(self) -> dict[str, int]:
        """Return plain values for a checkpoint."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainingState:
        """Restore the state from the values of ``to_dict``."""
        return cls(**values)


FRESH = TrainingState()
"""The state of a run before its first step."""
