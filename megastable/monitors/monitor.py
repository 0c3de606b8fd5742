"""Defines what a monitor is, what it knows of the run and what it sees of a step.

To add a monitor, derive a class from ``Monitor`` and give it a line in ``monitors.registry.MONITORS``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megastable.config import RunConfig
from megastable.config.stages import StageCut
from megastable.core.batch_rampup import Batch, RampPhase, RunLength
from megastable.core.layout import ParallelLayout
from megastable.core.records import Candidate, Event, Judgement, StepResult, TrainingState

STOP = "stop"
"""The kind of an event after which the run stops, on all ranks together."""


class PlannedRun(Protocol):
    """Tells a monitor what is known of a run before it starts or goes on.

    ``planning.run_plan.RunPlan`` has all of this. It is described here once more because rooms on one floor do not
    import each other.
    """

    @property
    def run(self) -> RunConfig:
        """Return the run file, with defaults filled in."""
        ...

    @property
    def layout(self) -> ParallelLayout:
        """Return the numbers of stages, replicas and tensor ranks."""
        ...

    @property
    def cut(self) -> StageCut:
        """Return which layers every stage has, with the imbalance that was predicted for them."""
        ...

    @property
    def phases(self) -> Sequence[RampPhase]:
        """Return the batches of the steps that are left, in order.

        A run that was resumed may have done the others under another ramp: what is needed of them belongs into the
        memory of the monitor.
        """
        ...

    @property
    def length(self) -> RunLength:
        """Return the numbers of steps and samples of the whole run."""
        ...

    def learning_rate(self, applied_samples: int, batch: Batch) -> float:
        """Return the learning rate of a step on ``batch`` after ``applied_samples`` samples of applied updates."""
        ...


@dataclass(frozen=True)
class Seen:
    """One step as monitors see it: rank-identical values only (but for the seconds), so that all ranks answer alike."""

    state: TrainingState
    """After the step."""
    batch: Batch
    learning_rate: float
    """What the optimizer was given; a skipped step did not use it."""
    result: StepResult
    samples_per_epoch: int | None = None
    """Number of training samples; None where a caller does not know the data."""

    def event(self, kind: str, text: str, **data: Any) -> Event:
        """Make an event of this step."""
        return Event(self.state.step, self.state.consumed_samples, kind, text, data)


class Monitor(ABC):
    """Watches one thing in every step of a run.

    Only ``observe`` has to be written; the other methods are those of a monitor that measures and remembers nothing and
    lets every update pass.
    """

    metric_names: Sequence[str] = ()
    """Names of the numbers that ``values`` may return. They are keys of ``metrics.jsonl`` beside those of the step, so
    a run refuses to start with a name that is in use already."""
    is_of_the_text: bool = False
    """True where its memory says nothing of another text, with which a run may go on."""
    should_watch_next_step: bool = False
    """True where the next step should be watched layer by layer, whatever ``monitors.interval`` says."""

    def __init__(self, plan: PlannedRun) -> None:
        self.plan = plan

    @abstractmethod
    def observe(self, seen: Seen) -> Iterator[Event]:
        """Take in a step and yield the events that it gives rise to; ``yield from ()`` where it never gives any."""

    def judge(self, candidate: Candidate) -> Iterator[Judgement]:
        """Yield what this monitor thinks of a step before its update; remembers nothing, that is ``observe``'s."""
        yield from ()

    @property
    def suspects_harm(self) -> bool:
        """Tell whether the weights may have come to harm in the last steps, so that no state proves good meanwhile."""
        return False

    def values(self) -> Mapping[str, float]:
        """Return numbers for the metrics of the step that was just observed; a name may be missing at some steps."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return all that the monitor remembers, as values that JSON can hold; it is part of every checkpoint."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027  # most monitors remember nothing
        """Go on from what ``state_dict`` returned, as if the run had not been interrupted."""
