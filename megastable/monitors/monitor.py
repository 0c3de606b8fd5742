"""What a monitor is: it sees every step and says what happened. To add one: a class and a line in the registry."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from megastable.config import RunConfig
from megastable.core.batch_rampup import Batch
from megastable.core.records import Event, StepResult, TrainingState

STOP = "stop"
"""The kind of an event after which the run stops, on all ranks together."""


@dataclass(frozen=True)
class Seen:
    """One step as monitors see it: rank-identical values only, so that all ranks answer alike."""

    state: TrainingState
    """After the step."""
    batch: Batch
    result: StepResult

    def event(self, kind: str, text: str, **data: Any) -> Event:
        """Something that happened at this step."""
        return Event(self.state.step, self.state.consumed_samples, kind, text, data)


class Monitor(Protocol):
    """Watches one thing. Its state is in every checkpoint, so a resumed run goes on watching where it was."""

    wants_a_look: bool
    """True where the next step should be watched, whatever the interval."""

    def __init__(self, run: RunConfig) -> None: ...

    def observe(self, seen: Seen) -> Iterator[Event]:
        """Take in a step; yields what happened."""
        ...

    def values(self) -> dict[str, float]:
        """Numbers for the metrics of the step that was just observed."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Plain values to go on from."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of ``state_dict``."""
        ...


class Stateless:
    """The rest of a monitor that remembers nothing and has no numbers."""

    wants_a_look = False

    def __init__(self, run: RunConfig) -> None:
        self.run = run

    def values(self) -> dict[str, float]:
        """None."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Nothing to remember."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to remember."""
