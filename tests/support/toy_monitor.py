"""A monitor as somebody might add it: it has a number of its own, from the learning rate and the plan, and a memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from megastable.core.records import Event
from megastable.monitors.monitor import Monitor, PlannedRun, Seen

METRIC = "learning_rate_progress"


class LearningRateProgress(Monitor):
    """Measures which share of all learning rates of the plan, added up, the updates so far have used.

    It grows with every applied update, and is 1 at the end of a run that skips no step.
    """

    metric_names: Sequence[str] = (METRIC,)

    def __init__(self, plan: PlannedRun) -> None:
        super().__init__(plan)
        self._planned = sum(planned_learning_rates(plan))
        self._used = 0.0

    def observe(self, seen: Seen) -> Iterator[Event]:
        """Add the learning rate up, and yield an event where half of all is used."""
        before = self._used
        if not seen.result.skipped:
            self._used += seen.learning_rate
        if before < self._planned / 2 <= self._used:
            yield seen.event("half_way", f"half of all learning rates used at {seen.learning_rate:.2e}")

    def values(self) -> dict[str, float]:
        """Return the share."""
        return {METRIC: self._used / self._planned}

    def state_dict(self) -> dict[str, Any]:
        """Return both sums: the plan of a resumed run has only the steps that are left."""
        return {"used": self._used, "planned": self._planned}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from the sums."""
        self._used = state["used"]
        self._planned = state["planned"]


def planned_learning_rates(plan: PlannedRun) -> Iterator[float]:
    """Yield the learning rate of every step of a run that skips none."""
    for phase in plan.phases:
        for number in range(phase.num_steps):
            samples = phase.first_sample + number * phase.batch.global_batch_size
            yield plan.learning_rate(samples, phase.batch)
