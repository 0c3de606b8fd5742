"""Steps of the batch ramp."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megastable.config import RunConfig
from megastable.core.records import Event
from megastable.monitors.monitor import Seen


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
