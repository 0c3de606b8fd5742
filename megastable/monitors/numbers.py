"""How near the numbers of the forward pass come to the end of their format.

Whether a run starts as it should.

How restless the loss is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from megastable.config import RunConfig
from megastable.core.records import Event
from megastable.core.robust import RollingDeviation
from megastable.monitors.monitor import Seen, Stateless


class Headroom(Stateless):
    """Warns where an activation or attention logit passes a share of the number format's maximum (65,504 in fp16)."""

    def observe(self, seen: Seen) -> Iterator[Event]:
        """A warning on a watched step that is above the share."""
        watched, limit = seen.result.watched, self.run.megastable.monitors.headroom_warning
        if watched is None or watched.headroom < limit:
            return
        values = watched.layers[watched.headroom_layer]
        kind = max(("max_activation", "max_attention_logit"), key=lambda name: values.get(name, 0.0))
        yield seen.event(
            "warning",
            f"{kind} of {watched.headroom_layer} is {values[kind]:.4g}, {watched.headroom:.0%} of what "
            f"{self.run.number_format} can hold: it may overflow soon",
            layer=watched.headroom_layer,
            headroom=watched.headroom,
        )


LARGEST_DEVIATION = 0.1


class FirstLoss(Stateless):
    """Fresh weights know nothing, so the first loss is near ln(vocabulary); one that is not has a cause."""

    def observe(self, seen: Seen) -> Iterator[Event]:
        """Both, after the first step; a warning where they are more than 10% apart."""
        if seen.state.step != 1:
            return
        loss, expected = seen.result.loss, math.log(self.run.megastable.model.vocab_size)
        text = f"the first loss is {loss:.4f}, ln(vocabulary) is {expected:.4f}"
        if abs(loss - expected) <= LARGEST_DEVIATION * expected:
            yield seen.event("first_loss", text, loss=loss, expected=expected)
        else:
            advice = "look at the init std, and at whether model.vocab_size is that of the data"
            yield seen.event("warning", f"{text}: over 10% off; {advice}", loss=loss, expected=expected)


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
