"""How near the numbers of the forward pass come to the end of their format."""

from __future__ import annotations

from collections.abc import Iterator

from megastable.core.records import Event
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
