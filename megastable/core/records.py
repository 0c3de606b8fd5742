"""The frozen records that the loop passes around."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from megastable.core.batch_rampup import Batch


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step gave; every value but the seconds is the same on every rank."""

    loss: float
    """Token mean over the global batch."""
    grad_norm: float
    """Global 2-norm of the unscaled gradients before clipping; inf where they overflowed."""
    loss_scale: float
    """The scale that this step's loss was multiplied by."""
    skipped: bool
    """True where the update was not applied because a gradient was not finite."""
    step_seconds: float


@dataclass(frozen=True)
class TrainingState:
    """Where a run stands. With weights, optimizer and RNGs, this is all that a checkpoint needs."""

    step: int = 0
    consumed_samples: int = 0
    """Position in the data and on the batch ramp; skipped steps move it too."""
    applied_samples: int = 0
    """Samples of applied updates: the clock of the learning rate, which a skipped step leaves alone."""
    consumed_tokens: int = 0
    skipped_steps: int = 0

    def advance(self, batch: Batch, result: StepResult, seq_length: int) -> TrainingState:
        """The state after a step on ``batch``."""
        return TrainingState(
            step=self.step + 1,
            consumed_samples=self.consumed_samples + batch.global_batch_size,
            applied_samples=self.applied_samples + (0 if result.skipped else batch.global_batch_size),
            consumed_tokens=self.consumed_tokens + batch.global_batch_size * seq_length,
            skipped_steps=self.skipped_steps + result.skipped,
        )

    def to_dict(self) -> dict[str, int]:
        """Plain values for a checkpoint."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainingState:
        """The inverse of ``to_dict``."""
        return cls(**values)
