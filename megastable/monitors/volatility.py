"""How restless the loss is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megastable.config import RunConfig
from megastable.core.records import Event
from megastable.core.robust import RollingDeviation
from megastable.monitors.monitor import Seen

WINDOW_STEPS = 64


class LossVolatility:
    """``loss_volatility``: robust standard deviation of the loss from step to step, over the last 64 steps."""

    wants_a_look = False

    def __init__(self, run: RunConfig) -> None:
        self._losses = RollingDeviation(WINDOW_STEPS)

    def observe(self, seen: Seen) -> Iterator[Event]:
        """Remember the loss; a volatile one is no event by itself."""
        self._losses.add(seen.result.loss)
        yield from ()

    def values(self) -> dict[str, float]:
        """The deviation, once there are three losses."""
        deviation = self._losses.deviation
        return {} if deviation is None else {"loss_volatility": deviation}

    def state_dict(self) -> dict[str, Any]:
        """The window."""
        return {"losses": self._losses.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of ``state_dict``."""
        self._losses = RollingDeviation(WINDOW_STEPS, state["losses"])
