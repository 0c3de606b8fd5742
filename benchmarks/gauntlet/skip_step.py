"""OLMo-core's rule, played in place of this trainer's own monitors: skip what stands out, and go back from nothing.

By ``olmo_core/optim/skip_step_optimizer.py``: a step is skipped where its loss or its gradient norm is more than 6
standard deviations above the mean of the 128 steps before, once 64 steps are known. What was skipped is remembered with
the rest. What is not finite poisons mean and deviation for as long as it is remembered, so that every step is skipped
meanwhile; that is the rule's own behaviour, in a trainer that stops where a loss is not finite.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterator, Sequence

from megastable.core.records import Candidate, Event, Judgement, Verdict
from megastable.monitors import MONITORS
from megastable.monitors.monitor import Monitor, PlannedRun, Seen

WINDOW_STEPS = 128
FEWEST_STEPS = 64
SIGMA_FACTOR = 6.0


def stands_out(value: float, before: Sequence[float]) -> bool:
    """Tell whether the rule skips a step of this value after those."""
    # As the rule counts: the step itself is one of the 64.
    if len(before) + 1 < FEWEST_STEPS:
        return False
    deviation = statistics.stdev(before) if all(abs(each) < float("inf") for each in before) else float("nan")
    return not value - statistics.fmean(before) <= SIGMA_FACTOR * deviation


class SkipStep(Monitor):
    """Skips a step by OLMo-core's rule."""

    def __init__(self, plan: PlannedRun) -> None:
        super().__init__(plan)
        self._losses: deque[float] = deque(maxlen=WINDOW_STEPS)
        self._norms: deque[float] = deque(maxlen=WINDOW_STEPS)

    def judge(self, candidate: Candidate) -> Iterator[Judgement]:
        """Yield a judgement where loss or norm stand out."""
        if stands_out(candidate.loss, self._losses) or stands_out(candidate.grad_norm, self._norms):
            yield Judgement(Verdict.SKIP, "skip_step", "loss or gradient norm is over 6 deviations above the mean", {})

    def observe(self, seen: Seen) -> Iterator[Event]:
        """Remember every step, those that were skipped too."""
        self._losses.append(seen.result.loss)
        self._norms.append(seen.result.grad_norm)
        yield from ()


def install_skip_step() -> None:
    """Leave no monitor but the rule in this process."""
    MONITORS.clear()
    MONITORS["skip_step"] = SkipStep
