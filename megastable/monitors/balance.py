"""Whether the stages of the pipeline are as equal as they were predicted to be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megastable.config import RunConfig
from megastable.config.stages import StageCut
from megastable.core.partition import imbalance
from megastable.core.records import Event
from megastable.monitors.monitor import Seen

LARGEST_EXCESS = 0.5
"""Of the measured imbalance over the predicted one: the slowest stage, whose pace is the pipeline's, takes half a mean
stage longer than it should. One step on shared cores was seen to be off by 0.23, and a count of operations knows
nothing of caches and clocks."""


class StageBalance:
    """One event a run: how much longer than the mean the slowest stage took at the first watched step that is not the
    process's first, in which everything warms up."""

    wants_a_look = False

    def __init__(self, run: RunConfig) -> None:
        sections = run.megastable
        self._predicted = StageCut.of(sections.model, sections.pipeline, sections.tensor_parallel).imbalance
        self._told = sections.pipeline.num_stages == 1
        self._warm = False

    def observe(self, seen: Seen) -> Iterator[Event]:
        """Measured beside predicted; a warning where the stages are far less equal."""
        watched, warm, self._warm = seen.result.watched, self._warm, True
        if self._told or watched is None or not warm:
            return
        self._told = True
        busy = list(watched.stage_busy_seconds.values())
        measured, slowest = imbalance(busy), max(range(len(busy)), key=busy.__getitem__)
        text = (
            f"the stages are {measured:.1%} out of balance (predicted {self._predicted:.1%}): stage {slowest} computed "
            f"{busy[slowest]:.3g} s of this step, the mean is {sum(busy) / len(busy):.3g} s"
        )
        data = {"measured": measured, "predicted": self._predicted, "slowest_stage": slowest}
        yield seen.event("stage_balance", text, **data)
        if measured > self._predicted + LARGEST_EXCESS:
            advice = (
                "look whether its devices are slower or shared; if not, move blocks with megastable.pipeline.partition"
            )
            yield seen.event("warning", f"stage {slowest} takes far longer than predicted: {advice}", **data)

    def values(self) -> dict[str, float]:
        """None: ``stage_busy_seconds`` is a metric already."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Whether the event was there."""
        return {"told": self._told}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of ``state_dict``."""
        self._told = state["told"]
