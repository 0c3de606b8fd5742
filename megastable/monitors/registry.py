"""Lists the monitors of a run and asks them as one."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from megastable.core.errors import UserError
from megastable.core.records import Candidate, Event, Judgement
from megastable.monitors.course import Divergence, Falls, Repeats, Spikes
from megastable.monitors.layers import AttentionLogits, UpdateJumps
from megastable.monitors.monitor import Monitor, PlannedRun, Seen
from megastable.monitors.numbers import FirstLoss, Headroom, LossVolatility, SkippedSteps
from megastable.monitors.ranks import MemoryGrowth, SlowRanks
from megastable.monitors.work_split import Epochs, RampSteps, StageBalance

MONITORS: dict[str, type[Monitor]] = {
    "first_loss": FirstLoss,
    "epochs": Epochs,
    "ramp_steps": RampSteps,
    "skipped_steps": SkippedSteps,
    "headroom": Headroom,
    "loss_volatility": LossVolatility,
    "spikes": Spikes,
    "falls": Falls,
    "repeats": Repeats,
    "divergence": Divergence,
    "update_jumps": UpdateJumps,
    "attention_logits": AttentionLogits,
    "stage_balance": StageBalance,
    "slow_ranks": SlowRanks,
    "memory_growth": MemoryGrowth,
}
"""Name, under which a checkpoint keeps its state, to monitor. Events of the monitors come in this order."""


class Monitors:
    """Holds one monitor of each kind for a run.

    Args:
        step_metrics: names of the metrics that every step has without monitors.

    Raises:
        UserError: a monitor measures something under a name that is in use already.
    """

    def __init__(self, plan: PlannedRun, step_metrics: Collection[str] = ()) -> None:
        self._plan = plan
        self._monitors: dict[str, Monitor] = {name: kind(plan) for name, kind in MONITORS.items()}
        self._check_metric_names(step_metrics)

    def judge(self, candidate: Candidate) -> list[Judgement]:
        """Ask every monitor what it thinks of a step before its update, in the registry's order."""
        return [judgement for monitor in self._monitors.values() for judgement in monitor.judge(candidate)]

    def observe(self, seen: Seen) -> list[Event]:
        """Show a step to every monitor and return their events, in the registry's order."""
        return [event for monitor in self._monitors.values() for event in monitor.observe(seen)]

    @property
    def should_watch_next_step(self) -> bool:
        """Tell whether any monitor asks for the next step to be watched layer by layer."""
        return any(monitor.should_watch_next_step for monitor in self._monitors.values())

    @property
    def suspects_harm(self) -> bool:
        """Tell whether any monitor thinks that the weights may have come to harm in the last steps."""
        return any(monitor.suspects_harm for monitor in self._monitors.values())

    def values(self) -> dict[str, float]:
        """Return the numbers of all monitors for the step that was just observed.

        Raises:
            ValueError: a monitor measures something that its ``metric_names`` do not list.
        """
        values: dict[str, float] = {}
        for name, monitor in self._monitors.items():
            measured = monitor.values()
            unlisted = sorted(measured.keys() - set(monitor.metric_names))
            # Only listed names were compared with those in use, so another one might overwrite a metric.
            if unlisted:
                raise ValueError(
                    f"the monitor {name} measures {', '.join(unlisted)}, which its metric_names do not list"
                )
            values.update(measured)
        return values

    def state_dict(self) -> dict[str, Any]:
        """Return what all monitors remember, as plain values for a checkpoint."""
        return {name: monitor.state_dict() for name, monitor in self._monitors.items()}

    def load_state_dict(self, state: Mapping[str, Any], is_same_text: bool = True) -> None:
        """Go on from what ``state_dict`` returned; monitors that the checkpoint does not know start afresh.

        Args:
            is_same_text: whether the run reads what it read then; otherwise memories of the text are left out.
        """
        for name, monitor in self._monitors.items():
            if monitor.is_of_the_text and not is_same_text:
                self._monitors[name] = MONITORS[name](self._plan)
                continue
            if name in state:
                monitor.load_state_dict(state[name])
            else:  # it was added to the program after the checkpoint was written
                self._monitors[name] = MONITORS[name](self._plan)

    def _check_metric_names(self, step_metrics: Collection[str]) -> None:
        user_of_name = dict.fromkeys(step_metrics, "the step itself")
        faults = []
        for name, monitor in self._monitors.items():
            for metric in monitor.metric_names:
                if metric in user_of_name:
                    faults.append(f"  {metric}, measured by the monitor {name}, is a metric of {user_of_name[metric]}")
                # The first keeps its name: all that come later are to be changed.
                user_of_name.setdefault(metric, f"the monitor {name}")
        if faults:
            raise UserError(
                "Every metric needs a name that no other has; change metric_names of the monitor:\n" + "\n".join(faults)
            )
