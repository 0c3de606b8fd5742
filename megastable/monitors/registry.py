"""All monitors of a run, asked as one."""

from __future__ import annotations

from typing import Any

from megastable.config import RunConfig
from megastable.core.records import Event
from megastable.monitors.balance import StageBalance
from megastable.monitors.monitor import Monitor, Seen
from megastable.monitors.numbers import FirstLoss, Headroom, LossVolatility
from megastable.monitors.steps import RampSteps, SkippedSteps

MONITORS: dict[str, type[Monitor]] = {
    "first_loss": FirstLoss,
    "ramp_steps": RampSteps,
    "skipped_steps": SkippedSteps,
    "headroom": Headroom,
    "loss_volatility": LossVolatility,
    "stage_balance": StageBalance,
}


class Monitors:
    """One of each kind."""

    def __init__(self, run: RunConfig) -> None:
        self._monitors: dict[str, Monitor] = {name: kind(run) for name, kind in MONITORS.items()}

    def observe(self, seen: Seen) -> list[Event]:
        """Show a step to every monitor; what happened, in the registry's order."""
        return [event for monitor in self._monitors.values() for event in monitor.observe(seen)]

    @property
    def want_a_look(self) -> bool:
        """True where any monitor wants the next step to be watched."""
        return any(monitor.wants_a_look for monitor in self._monitors.values())

    def values(self) -> dict[str, float]:
        """The numbers of all monitors for the step that was just observed."""
        return {name: value for monitor in self._monitors.values() for name, value in monitor.values().items()}

    def state_dict(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return {name: monitor.state_dict() for name, monitor in self._monitors.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse; monitors that the checkpoint does not know start afresh."""
        for name, monitor in self._monitors.items():
            if name in state:
                monitor.load_state_dict(state[name])
