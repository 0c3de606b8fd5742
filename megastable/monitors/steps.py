"""Steps of the batch ramp.

Skipped steps: each is an event, and a row of them that no loss scale can end stops the run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megastable.config import RunConfig
from megastable.core.records import Event, Watched
from megastable.monitors.monitor import STOP, Seen


class RampSteps:
    """An event where the global batch or its split changes."""

    wants_a_look = False

    def __init__(self, run: RunConfig) -> None:
        self._last: list[int] | None = None

    def observe(self, seen: Seen) -> Iterator[Event]:
        """Compare with the step before."""
        batch = seen.batch
        now = [batch.global_batch_size, batch.micro_batch_size, batch.num_microbatches]
        if self._last is not None and now != self._last:
            yield seen.event(
                "ramp",
                f"global batch {self._last[0]} -> {now[0]}: {now[2]} micro-batches of {now[1]} a replica",
                global_batch_size=now[0],
                micro_batch_size=now[1],
                num_microbatches=now[2],
            )
        self._last = now

    def values(self) -> dict[str, float]:
        """None: the batch is a metric already."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """The last batch."""
        return {"last": self._last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of ``state_dict``."""
        self._last = state["last"]


class SkippedSteps:
    """Counts skips in a row at which the loss scale has nowhere left to go: at its minimum, fixed, or not there."""

    def __init__(self, run: RunConfig) -> None:
        self._fp16 = run.fp16
        self._most = run.megastable.monitors.max_skips_at_min_scale
        self._hopeless = 0
        self.wants_a_look = False
        """After a skip, so that a diagnosis can say where the numbers are."""

    def observe(self, seen: Seen) -> Iterator[Event]:
        """An event for a skip, and one that stops the run after too many in a row."""
        self.wants_a_look = seen.result.skipped
        if not seen.result.skipped:
            self._hopeless = 0
            return
        scale = seen.result.loss_scale
        kind = "overflow" if self._fp16.enabled else "skip"
        where = f" at loss scale {scale:g}" if self._fp16.enabled else ""
        yield seen.event(kind, f"a gradient was not finite{where}: the step was skipped", loss_scale=scale)
        self._hopeless = 0 if self._can_fall(scale) else self._hopeless + 1
        if self._hopeless >= self._most:
            yield seen.event(STOP, self._diagnosis(seen), skips_in_a_row=self._hopeless, loss_scale=scale)

    def _can_fall(self, scale: float) -> bool:
        dynamic = self._fp16.enabled and self._fp16.loss_scale == 0
        return dynamic and scale > self._fp16.min_loss_scale

    def _diagnosis(self, seen: Seen) -> str:
        if not self._fp16.enabled:
            scale = "there is no loss scale that could fall"
        elif self._fp16.loss_scale:
            scale = f"the loss scale is fixed at {self._fp16.loss_scale:g}"
        else:
            scale = f"the loss scale is at its minimum, fp16.min_loss_scale = {self._fp16.min_loss_scale}"
        return (
            f"{self._hopeless} steps in a row were skipped because a gradient was not finite, and {scale}. "
            f"{_where(seen.result.watched)} The weights are those before these steps. Go on from a checkpoint before "
            "the first of them with a lower learning rate, a longer warmup or a smaller init std; on a device that has "
            "bf16, take that instead of fp16."
        )

    def values(self) -> dict[str, float]:
        """None: ``skipped_steps`` is part of the training state."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """The skips in a row."""
        return {"hopeless": self._hopeless, "wants_a_look": self.wants_a_look}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of ``state_dict``."""
        self._hopeless, self.wants_a_look = state["hopeless"], state["wants_a_look"]


def _where(watched: Watched | None) -> str:
    """The first layer whose activation is not finite, or the one that is nearest to the limit."""
    if watched is None:
        return "The step was not watched, so which layer is the cause is not known."
    for name, values in watched.layers.items():
        for kind in ("max_attention_logit", "max_activation"):
            if values.get(kind, 0.0) == float("inf"):
                return f"The forward pass is the cause: {kind} of {name}, the first such layer, is not finite."
    return (
        f"The forward pass is finite: its largest value, in {watched.headroom_layer}, is at {watched.headroom:.1%} of "
        "the format's maximum. The gradients overflow on their way back."
    )
