"""Whether a run goes on, told from its files alone."""

from __future__ import annotations

from dataclasses import dataclass

from megastable.cli.cells import duration
from megastable.cli.run_files import RunState, number

QUIET_STEP_TIMES = 10
"""A run is quiet after as many step times without a new step, which leaves room to evaluate and to save."""
SHORTEST_QUIET_SECONDS = 10.0


@dataclass(frozen=True)
class Status:
    """A sentence on the run, and the style in which it is shown."""

    text: str
    style: str


def status_of(state: RunState, now_unix: float) -> Status:
    """Waiting, finished, stopped, quiet or running, and how old the newest step is."""
    if not state.steps or state.newest_step_unix is None:
        return Status("waiting for the first step", "bold yellow")
    age_seconds = max(0.0, now_unix - state.newest_step_unix)
    newest = f"newest step {duration(age_seconds)} ago"
    step = number(state.newest, "step")
    if state.length is not None and step is not None and step >= state.length.total_steps:
        return Status(f"finished, {newest}", "bold green")
    if _has_stopped(state):
        return Status(f"stopped, {newest}", "bold red")
    step_seconds = state.step_seconds or 0.0
    if age_seconds > max(SHORTEST_QUIET_SECONDS, QUIET_STEP_TIMES * step_seconds):
        return Status(f"QUIET: {newest}; a step usually takes {duration(step_seconds)}", "bold red")
    return Status(f"running, {newest}", "bold green")


def _has_stopped(state: RunState) -> bool:
    """The last event is a stop, and no step came after it; it may name the step before which it happened."""
    last = state.events[-1] if state.events else {}
    step, stop_step = number(state.newest, "step"), number(last, "step")
    return last.get("kind") == "stop" and step is not None and stop_step in (step, step + 1)
