"""The frozen records that the loop passes to the monitors, the metrics and the checkpoints."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import IntEnum
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
    rank_busy_seconds: tuple[float, ...]
    """Of every rank, in its passes."""
    rank_host_memory_gib: tuple[float, ...]
    """Of every rank's process, without the pages that it shares, such as those of a file of tokens."""


@dataclass(frozen=True)
class Event:
    """What a monitor reports of a step; one line of ``events.jsonl``."""

    step: int
    consumed_samples: int
    kind: str
    text: str
    data: dict[str, Any]


class Verdict(IntEnum):
    """What should become of a step, from harmless to hopeless."""

    CONTINUE = 0
    WARN = 1
    SKIP = 2
    """Without this update: the samples are used up, weights and moments stay."""
    ROLLBACK = 3
    """Back to a state before the harm was done, and past the samples since then."""
    STOP = 4


@dataclass(frozen=True)
class Candidate:
    """A step whose update has not been applied yet; the same on every rank."""

    loss: float
    """Token mean over the global batch."""
    grad_norm: float
    """As in ``StepResult``; finite, like the loss: what is not is skipped whatever anybody thinks of it."""
    global_batch_size: int


@dataclass(frozen=True)
class Judgement:
    """What a monitor thinks of a step before its update, and why."""

    verdict: Verdict
    kind: str
    """Of the event that tells it."""
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
    """True where the update was not applied: a gradient or the loss was not finite, it was vetoed, or there was nothing
    to learn."""
    step_seconds: float
    watched: Watched | None = None
    """None where the step was not watched."""
    asked_to_stop: bool = False
    """True where a rank had been asked to stop before the end of the step."""
    vetoed: bool = False
    """True where the update was skipped although loss and gradients were finite."""
    asked_to_save: bool = False
    """True where a rank asked for a save after the step."""
    has_labels: bool = True
    """False where the global batch had no token to learn from, so that nothing was computed."""


@dataclass(frozen=True)
class Culprit:
    """The first value of a step that is not finite, in the order in which values depend on each other."""

    origin: str
    """``weights``, ``data``, ``forward`` or ``backward``: where it came up."""
    layer: str
    """As in ``block_3``; of data ``token ids`` or ``labels``."""
    module: str
    """Inside of the layer, as in ``attention.output``; empty where it is the layer itself."""
    tensor: str
    """What it is of the module, as in ``output``."""
    num_bad: int
    num_elements: int
    """Of the tensor, on this rank."""
    rank: int
    stage: int
    replica: int
    tensor_rank: int
    micro_batch: int | None
    """Of those of the replica, counted from 0; None for what was there before all of them, and for the sum of all."""


@dataclass(frozen=True)
class Rollback:
    """A return to an earlier state."""

    from_step: int
    """At which the run went back."""
    to_step: int
    first_sample: int
    """The first position in the order of the samples that was left out."""
    next_sample: int
    """The position after the last one; the same as the first where none was left out."""


@dataclass(frozen=True)
class TrainingState:
    """Counts how far a run has come. With weights, optimizer and RNGs, this is all that a checkpoint needs."""

    step: int = 0
    consumed_samples: int = 0
    """Position on the batch ramp; skipped steps move it too."""
    applied_samples: int = 0
    """Samples of applied updates: the clock of the learning rate, which a skipped step leaves alone."""
    consumed_tokens: int = 0
    skipped_steps: int = 0
    left_out_samples: int = 0
    """Samples of the order that were passed over."""
    rollbacks: tuple[Rollback, ...] = ()
    """All of this run so far, oldest first."""

    @property
    def data_position(self) -> int:
        """Return the position in the order of the samples, ahead of those consumed where some were left out."""
        return self.consumed_samples + self.left_out_samples

    def advance(self, batch: Batch, result: StepResult, seq_length: int, left_out_samples: int = 0) -> TrainingState:
        """Return the state after a step on ``batch``.

        Args:
            left_out_samples: passed over before the last sample of the step.
        """
        # A skipped step uses up its samples, or it would meet the same ones again, but it trains on none.
        applied_now = 0 if result.skipped else batch.global_batch_size
        return TrainingState(
            step=self.step + 1,
            consumed_samples=self.consumed_samples + batch.global_batch_size,
            applied_samples=self.applied_samples + applied_now,
            consumed_tokens=self.consumed_tokens + batch.global_batch_size * seq_length,
            skipped_steps=self.skipped_steps + result.skipped,
            left_out_samples=self.left_out_samples + left_out_samples,
            rollbacks=self.rollbacks,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for a checkpoint."""
        return asdict(self)


FRESH = TrainingState()
"""The state of a run before its first step."""
