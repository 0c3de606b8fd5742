"""Whether a run starts as it should."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megastable.core.records import Event
from megastable.monitors.monitor import Seen, Stateless

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
