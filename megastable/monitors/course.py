"""Monitors of the course of a run: steps that stand out from those before, and a loss that falls or rises for long."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterator
from typing import Any

from megastable.core.records import Candidate, Event, Judgement, Verdict
from megastable.core.robust import WindowOfBatches
from megastable.monitors.monitor import Monitor, PlannedRun, Seen

FEWEST_STEPS = 16
"""Fewer say little of how much values spread."""
LEAST_DEVIATION_OF_LOSS = 0.01
"""Of the median. On a plateau the loss of neighbouring steps may be almost equal."""
SMALLEST_DEVIATION = 1e-6
"""Where the loss itself is zero, as of a text that is known by heart."""
LEAST_DEVIATION_OF_LOG_NORM = 0.05
ANY_BATCH = 1
"""A larger batch has a lower norm, which is nothing to judge; how much norms spread, by factors, it changes little."""
SMOOTHED_STEPS = 16
EVEN_SHARE = 0.25
EVEN_STEPS = 8
"""Of noise, one bend in seven is so small. Neighbouring bends share losses, so that eight in a row are not as rare as
eight by themselves: about once in a million steps."""
SUSPECTED_STEPS = 3
FALLEN_STEPS = 4
"""Steps in a row that no easy batch explains."""


class Spikes(Monitor):
    """Judges a step whose loss or gradient norm is far above those of the steps before it.

    A norm is compared by its logarithm, since norms spread by factors. A loss that jumps says that earlier updates have
    done harm, or that the data is bad: the run should go back. A norm that jumps has done no harm yet.
    """

    is_of_the_text = True

    def __init__(self, plan: PlannedRun) -> None:
        super().__init__(plan)
        self._settings = plan.run.megastable.stability
        self._losses = WindowOfBatches(self._settings.window_steps)
        self._log_norms = WindowOfBatches(self._settings.window_steps)

    def observe(self, seen: Seen) -> Iterator[Event]:
        """Remember a step whose update was applied."""
        if not seen.result.skipped:
            self._losses.add(seen.result.loss, seen.batch.global_batch_size)
            self._log_norms.add(_log(seen.result.grad_norm), ANY_BATCH)
        yield from ()

    def judge(self, candidate: Candidate) -> Iterator[Judgement]:
        """Yield a judgement for a loss, and one for a norm, that is too many deviations above its median."""
        if not _are_enough(self._losses, self._settings.window_steps):
            return
        least = _least_of_loss(self._losses)
        of_loss = self._losses.deviations(candidate.loss, candidate.global_batch_size, least)
        of_norm = self._log_norms.deviations(_log(candidate.grad_norm), ANY_BATCH, LEAST_DEVIATION_OF_LOG_NORM)
        if of_loss > self._settings.spike_deviations:
            text = _above(f"the loss, {candidate.loss:.4f},", of_loss, f"{self._losses.median:.4f}")
            yield Judgement(Verdict.ROLLBACK, "spike", text, {"of": "loss", "deviations": of_loss})
        if of_norm > self._settings.spike_deviations:
            median = f"{math.exp(self._log_norms.median):.4g}"
            text = _above(f"the gradient norm, {candidate.grad_norm:.4g},", of_norm, median)
            yield Judgement(Verdict.SKIP, "spike", text, {"of": "grad_norm", "deviations": of_norm})

    def state_dict(self) -> dict[str, Any]:
        """Return both windows, oldest first."""
        return {"losses": self._losses.values, "log_norms": self._log_norms.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with both windows."""
        window = self._settings.window_steps
        self._losses = WindowOfBatches(window, [(value, size) for value, size in state["losses"]])
        self._log_norms = WindowOfBatches(window, [(value, size) for value, size in state["log_norms"]])


class Falls(Monitor):
    """Judges a run whose loss has been far below those of the steps before it for some steps in a row.

    Nobody learns so fast: the same text is read again and again, or what is to be predicted stands in the input. A
    single such step may be an easy batch. It is told and no more, since a loss that falls does no harm by itself, and
    may be what a run has found out; a new epoch, of text that was read before, is begun anew.
    """

    is_of_the_text = True

    def __init__(self, plan: PlannedRun) -> None:
        super().__init__(plan)
        self._settings = plan.run.megastable.stability
        self._losses = WindowOfBatches(self._settings.window_steps)
        self._steps_below = 0

    def observe(self, seen: Seen) -> Iterator[Event]:
        """Count a step whose update was applied and whose loss is too low, and remember any other."""
        if _begins_an_epoch(seen):
            self._begin_anew()
        if seen.result.skipped:
            return
        if self._is_too_low(seen.result.loss, seen.batch.global_batch_size):
            # Not remembered: in a window of fallen losses the next ones would look usual.
            self._steps_below += 1
            if self._steps_below >= FALLEN_STEPS:  # told by now, and what is usual is another loss from here on
                self._begin_anew()
            return
        self._losses.add(seen.result.loss, seen.batch.global_batch_size)
        self._steps_below = 0
        yield from ()

    def _begin_anew(self) -> None:
        self._losses = WindowOfBatches(self._settings.window_steps)
        self._steps_below = 0

    def _is_too_low(self, loss: float, batch_size: int) -> bool:
        if not _are_enough(self._losses, self._settings.window_steps):
            return False
        return (
            self._losses.deviations(loss, batch_size, _least_of_loss(self._losses)) < -self._settings.spike_deviations
        )

    def judge(self, candidate: Candidate) -> Iterator[Judgement]:
        """Yield a judgement at the last of the steps in a row."""
        steps = self._steps_below + 1
        if steps < FALLEN_STEPS or not self._is_too_low(candidate.loss, candidate.global_batch_size):
            return
        text = (
            f"the loss, {candidate.loss:.4f}, has been over {self._settings.spike_deviations:g} deviations below the "
            f"median of the steps before, {self._losses.median:.4f}, for {steps} steps: is the same text read again "
            "and again, or does the input hold what is to be predicted?"
        )
        yield Judgement(Verdict.WARN, "fall", text, {"median": self._losses.median, "steps_below": steps})

    def state_dict(self) -> dict[str, Any]:
        """Return the window, oldest first, and the count of steps below it."""
        return {"losses": self._losses.values, "steps_below": self._steps_below}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what was remembered."""
        window = self._settings.window_steps
        self._losses = WindowOfBatches(window, [(value, size) for value, size in state["losses"]])
        self._steps_below = state["steps_below"]


class Repeats(Monitor):
    """Judges a run whose loss has gone on as evenly, for some steps, as that of a single batch does.

    Losses of other samples are noisy. That of samples which are read again and again falls smoothly, by what each
    update learns of them; whether it falls far depends on the model. What is looked at is how much a change of the loss
    differs from the change before: noise does not cancel there, and a trend does, however steep it is or was.

    It is told once and no more: where noise itself has become less, as of other text, that is usual from then on.
    """

    is_of_the_text = True

    def __init__(self, plan: PlannedRun) -> None:
        super().__init__(plan)
        self._settings = plan.run.megastable.stability
        self._bends: deque[float] = deque(maxlen=self._settings.window_steps)
        self._recent: deque[float] = deque(maxlen=2)
        self._even_steps = 0

    def observe(self, seen: Seen) -> Iterator[Event]:
        """Count a step whose update was applied and whose loss is even, and remember any other."""
        if seen.result.skipped:
            return
        loss = seen.result.loss
        bend = self._bend(loss, seen.batch.global_batch_size)
        self._recent.append(loss)
        if bend is None:
            return
        if self._is_even(bend):
            self._even_steps += 1
        else:
            self._even_steps = 0
        # Even ones in a row are not remembered: what is usual would become as even.
        if self._even_steps < SUSPECTED_STEPS:
            self._bends.append(bend)
        elif self._even_steps >= EVEN_STEPS:  # told by now
            self._bends.clear()
            self._even_steps = 0
        yield from ()

    def _bend(self, loss: float, batch_size: int) -> float | None:
        """Return the second difference of the loss, times the root of the batch with which its noise falls."""
        if len(self._recent) < 2:
            return None
        before, last = self._recent
        return abs(loss - 2 * last + before) * math.sqrt(batch_size)

    def _is_even(self, bend: float) -> bool:
        if len(self._bends) < max(FEWEST_STEPS, self._settings.window_steps // 4):
            return False
        return bend < EVEN_SHARE * statistics.median(self._bends)

    def judge(self, candidate: Candidate) -> Iterator[Judgement]:
        """Yield a judgement at the last of the steps in a row."""
        bend = self._bend(candidate.loss, candidate.global_batch_size)
        steps = self._even_steps + 1
        if bend is None or steps < EVEN_STEPS or not self._is_even(bend):
            return
        text = (
            f"the loss, {candidate.loss:.4f}, has gone on for {steps} steps with less than {EVEN_SHARE:g} of its usual "
            "noise, as that of a single batch: are the same samples read again and again?"
        )
        yield Judgement(Verdict.WARN, "repeat", text, {"even_steps": steps})

    def state_dict(self) -> dict[str, Any]:
        """Return the usual bends, oldest first, the last losses, and the count of even steps."""
        return {"bends": list(self._bends), "recent": list(self._recent), "even_steps": self._even_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what was remembered."""
        self._bends = deque(state["bends"], maxlen=self._settings.window_steps)
        self._recent = deque(state["recent"], maxlen=2)
        self._even_steps = state["even_steps"]


class Divergence(Monitor):
    """Judges a run whose loss, smoothed over 16 steps, has been far above its lowest value for many steps."""

    is_of_the_text = True

    def __init__(self, plan: PlannedRun) -> None:
        super().__init__(plan)
        self._settings = plan.run.megastable.stability
        self._recent: deque[float] = deque(maxlen=SMOOTHED_STEPS)
        self._lowest = math.inf
        self._steps_above = 0

    def observe(self, seen: Seen) -> Iterator[Event]:
        """Remember the loss of a step whose update was applied, and count those that are too high."""
        # A step that is not finite is not judged.
        was_judged = seen.result.vetoed or not seen.result.skipped
        if was_judged and self._steps_above >= self._settings.divergence_steps:
            # It was told before this step's update; the next time is as many steps later.
            self._steps_above = 0
        if not seen.result.skipped:
            self._recent.append(seen.result.loss)
            self._count()
        yield from ()

    def _count(self) -> None:
        if len(self._recent) < SMOOTHED_STEPS:
            return
        smoothed = statistics.median(self._recent)
        self._lowest = min(self._lowest, smoothed)
        if smoothed > self._lowest + self._settings.divergence_margin:
            self._steps_above += 1
        else:
            self._steps_above = 0

    def judge(self, candidate: Candidate) -> Iterator[Judgement]:
        """Yield a judgement where the loss has been too high for ``divergence_steps`` steps."""
        if self._steps_above < self._settings.divergence_steps:
            return
        smoothed = statistics.median(self._recent)
        text = (
            f"the loss, {smoothed:.4f} in the median of {SMOOTHED_STEPS} steps, has been more than "
            f"{self._settings.divergence_margin:g} above its lowest, {self._lowest:.4f}, for {self._steps_above} steps"
        )
        data = {"smoothed_loss": smoothed, "lowest": self._lowest, "steps_above": self._steps_above}
        yield Judgement(Verdict.ROLLBACK, "divergence", text, data)

    @property
    def suspects_harm(self) -> bool:
        """Tell whether the loss is above its lowest value by now, whatever becomes of it."""
        return self._steps_above > 0

    def state_dict(self) -> dict[str, Any]:
        """Return the last losses, the lowest smoothed one and the count of steps above it."""
        lowest = self._lowest if math.isfinite(self._lowest) else None
        return {"recent": list(self._recent), "lowest": lowest, "steps_above": self._steps_above}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what was remembered."""
        self._recent = deque(state["recent"], maxlen=SMOOTHED_STEPS)
        self._lowest = math.inf if state["lowest"] is None else state["lowest"]
        self._steps_above = state["steps_above"]


def _begins_an_epoch(seen: Seen) -> bool:
    if seen.samples_per_epoch is None:
        return False
    position = seen.state.data_position
    before = position - seen.batch.global_batch_size
    return position // seen.samples_per_epoch != before // seen.samples_per_epoch


def _are_enough(window: WindowOfBatches, window_steps: int) -> bool:
    return len(window.values) >= max(FEWEST_STEPS, window_steps // 4)


def _least_of_loss(losses: WindowOfBatches) -> float:
    return max(LEAST_DEVIATION_OF_LOSS * abs(losses.median), SMALLEST_DEVIATION)


def _log(norm: float) -> float:
    # A model with constant loss has no gradient; any norm is far above that.
    return math.log(max(norm, 1e-30))


def _above(what: str, deviations: float, median: str) -> str:
    return f"{what} is {deviations:.1f} deviations above the median of the steps before, {median}"
