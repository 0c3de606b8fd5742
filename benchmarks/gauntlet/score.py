"""Scores a played scenario by what its run left behind, beside the run without the fault."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from gauntlet.scenario import Scenario

TOLERANCE = 0.01
"""Share by which the final loss of a run that recovered may differ from the clean run's."""
ALARMS = re.compile(r"^(warning|spike|fall|repeat|moved|divergence|culprit|skip|overflow|stop|rollback)$")
"""Kinds of events that a clean run must not have."""
REVIEWED = re.compile(r"review: (error|warning) .*")


class Traces(Protocol):
    """What a run leaves behind, see ``play.Played``."""

    exit_codes: list[list[int | None]]
    events: list[dict[str, Any]]
    rows: list[dict[str, Any]]
    output: str
    had_to_be_killed: int

    @property
    def final_loss(self) -> float | None:
        """Return the validation loss at the end; None where the run did not come to it."""
        ...

    @property
    def first_exit_code(self) -> int | None:
        """Return how the first start has ended."""
        ...


@dataclass(frozen=True)
class Score:
    """What came of a scenario.

    Attributes:
        recovered: None where it is the user's to mend.
        final_loss: the validation loss at the end; None where the run did not come to it.
    """

    name: str
    injected_step: int
    detected_step: int | None
    culprit_named: bool
    recovered: bool | None
    final_loss: float | None
    clean_final_loss: float | None
    told: str
    """The line that detected it."""
    named: str
    """The line that named the culprit."""
    exit_codes: list[list[int | None]]

    @property
    def passed(self) -> bool:
        """Tell whether the fault was detected and named, and recovered from where that is asked."""
        return self.detected_step is not None and self.culprit_named and self.recovered is not False


def score(scenario: Scenario, played: Traces, clean: Traces) -> Score:
    """Score a run with the fault of ``scenario`` by the same run without it."""
    lines = list(told_lines(scenario, played))
    detected = next(((step, line) for step, line in lines if scenario.is_detected_by(line)), None)
    named = next((line for _, line in lines if scenario.is_named_by(line)), "")
    return Score(
        name=scenario.name,
        injected_step=scenario.injected_step,
        detected_step=None if detected is None else detected[0],
        culprit_named=bool(named),
        recovered=_recovered(scenario, played, clean.final_loss),
        final_loss=played.final_loss,
        clean_final_loss=clean.final_loss,
        told="" if detected is None else detected[1],
        named=named,
        exit_codes=played.exit_codes,
    )


def told_lines(scenario: Scenario, played: Traces) -> Iterator[tuple[int, str]]:
    """Yield all that the run told from the fault on, as step and ``kind: text``: events first, then printed lines.

    A printed line has no step of its own: it is of the start where the fault is, and else of the step that was not
    taken any more.
    """
    for event in played.events:
        if event["step"] >= scenario.injected_step:
            yield event["step"], f"{event['kind']}: {event['text']}"
    stood_at = max((row["step"] for row in played.rows if row["step"] < scenario.injected_step), default=-1) + 1
    for line in played.output.splitlines():
        yield stood_at, line


def _recovered(scenario: Scenario, played: Traces, clean_loss: float | None) -> bool | None:
    if scenario.recovery == "by the user":
        return None
    ended_well = played.first_exit_code in scenario.exit_codes and len(played.exit_codes) <= 2
    loss = played.final_loss
    if not ended_well or loss is None or clean_loss is None:
        return False
    return abs(loss - clean_loss) <= TOLERANCE * clean_loss


def false_alarms(played: Traces) -> list[str]:
    """List what a clean run said that it should not have."""
    alarms = [f"step {e['step']} {e['kind']}: {e['text']}" for e in played.events if ALARMS.match(e["kind"])]
    reviewed = [found.group() for found in REVIEWED.finditer(played.output)]
    return [*alarms, *reviewed]
