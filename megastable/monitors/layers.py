"""Monitors of single layers over the looks: an update that jumps, and attention logits that grow and grow."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterator
from typing import Any

from megastable.core.records import Event
from megastable.monitors.monitor import Monitor, PlannedRun, Seen

REMEMBERED_LOOKS = 8
FEWEST_LOOKS = 4
JUMP_FACTOR = 10.0
"""Adam bounds an update by the learning rate times a small number: between two looks it moves by much less."""
LARGE_LOGIT = 50.0
"""A difference of two logits of this size leaves the smaller a weight of 1e-22: attention looks at one token."""
GROWTH_FACTOR = 2.0


class UpdateJumps(Monitor):
    """Warns of a layer whose update is many times what it was at the looks before, for the same learning rate.

    Adam's step is bounded, so that hardly any gradient does that: most likely a number of its moments or of the weights
    has gone bad. What stays so is told once, and becomes what is usual.
    """

    def __init__(self, plan: PlannedRun) -> None:
        super().__init__(plan)
        self._ratios: dict[str, deque[float]] = {}
        self._told: set[str] = set()

    def observe(self, seen: Seen) -> Iterator[Event]:
        """Yield a warning for every layer that has jumped; the first look at what has jumped is not remembered."""
        watched = seen.result.watched
        if watched is None or seen.result.skipped or seen.learning_rate == 0:
            return
        for name, values in watched.layers.items():
            if "update_ratio" not in values:
                continue
            ratio = values["update_ratio"] / seen.learning_rate
            before = self._ratios.setdefault(name, deque(maxlen=REMEMBERED_LOOKS))
            usual = statistics.median(before) if len(before) >= FEWEST_LOOKS else math.inf
            # Not turned round into a <=: a ratio that is NaN has to take this branch.
            has_jumped = not ratio <= JUMP_FACTOR * usual
            if has_jumped and name not in self._told:
                self._told.add(name)
                text = (
                    f"the update of {name} is {values['update_ratio']:.3g} of its weights, {ratio / usual:.3g} times "
                    "what it was at the looks before at the same learning rate: most likely a moment of the optimizer "
                    "or a weight has gone bad"
                )
                yield seen.event("warning", text, layer=name, update_ratio=values["update_ratio"])
                continue
            if not has_jumped:
                self._told.discard(name)
            # At a tiny learning rate an update is rounded away, which says nothing of the next ones.
            if 0 < ratio < math.inf:
                before.append(ratio)

    def state_dict(self) -> dict[str, Any]:
        """Return the ratios of every layer to the learning rate, oldest first, and the layers that were told of."""
        return {"ratios": {name: list(ratios) for name, ratios in self._ratios.items()}, "told": sorted(self._told)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from the ratios."""
        self._ratios = {name: deque(ratios, REMEMBERED_LOOKS) for name, ratios in state["ratios"].items()}
        self._told = set(state["told"])


class AttentionLogits(Monitor):
    """Warns of a block whose attention logits are large and have doubled within the last looks.

    Logits that grow on and on are how many runs have ended: attention becomes one-hot and learns no more (Zhai et al.,
    arXiv 2303.06296; Wortsman et al., arXiv 2309.14322).
    """

    def __init__(self, plan: PlannedRun) -> None:
        super().__init__(plan)
        self._logits: dict[str, deque[float]] = {}
        self._told: set[str] = set()

    def observe(self, seen: Seen) -> Iterator[Event]:
        """Yield a warning for a block whose logits have become large."""
        if seen.result.watched is None:
            return
        for name, values in seen.result.watched.layers.items():
            if "max_attention_logit" not in values:
                continue
            logit = values["max_attention_logit"]
            looks = self._logits.setdefault(name, deque(maxlen=REMEMBERED_LOOKS))
            if logit > 0:  # of a query or key of zeros, there is nothing to grow from
                looks.append(logit)
            # What is not finite is told by others.
            if not LARGE_LOGIT <= logit < math.inf or logit < GROWTH_FACTOR * looks[0]:
                self._told.discard(name)
            elif name not in self._told:
                self._told.add(name)
                text = (
                    f"the largest attention logit of {name} is {logit:.4g}, {logit / looks[0]:.1f} times what it was "
                    f"{len(looks) - 1} looks before: attention looks at single tokens alone; model.qk_norm or "
                    "model.attention_logit_cap bound it, a lower learning rate slows it"
                )
                yield seen.event("warning", text, layer=name, max_attention_logit=logit)

    def state_dict(self) -> dict[str, Any]:
        """Return the logits of every block, oldest first, and the blocks that were told of."""
        return {"logits": {name: list(looks) for name, looks in self._logits.items()}, "told": sorted(self._told)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from the logits."""
        self._logits = {name: deque(looks, REMEMBERED_LOOKS) for name, looks in state["logits"].items()}
        self._told = set(state["told"])
