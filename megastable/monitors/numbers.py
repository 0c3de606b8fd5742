"""Monitors of the numbers: whether loss, activations and gradients are sound and stay inside their format."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from typing import Any

from megastable.core.records import Event, Watched
from megastable.core.robust import RollingDeviation
from megastable.monitors.monitor import STOP, Monitor, PlannedRun, Seen

LARGEST_DEVIATION = 0.1
"""Share of ln(vocabulary) by which the first loss may differ from it."""
WINDOW_STEPS = 64


class FirstLoss(Monitor):
    """Compares the first loss with ln(vocabulary).

    That is the loss of a model that gives every token the same probability, as one with fresh weights nearly does.
    """

    def __init__(self, plan: PlannedRun) -> None:
        super().__init__(plan)
        self._weights_are_fresh = True

    def state_dict(self) -> dict[str, Any]:
        """Return whether the run began with fresh weights: the checkpoint of an imported model says that it did not."""
        return {"weights_are_fresh": self._weights_are_fresh}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what ``state_dict`` returned; earlier checkpoints are all of runs from fresh weights."""
        self._weights_are_fresh = state.get("weights_are_fresh") is not False

    def observe(self, seen: Seen) -> Iterator[Event]:
        """Yield both numbers after the first step, as a warning where they are more than 10% apart."""
        if seen.state.step != 1 or not self._weights_are_fresh:
            return
        loss = seen.result.loss
        expected = math.log(self.plan.run.megastable.model.vocab_size)
        text = f"the first loss is {loss:.4f}, ln(vocabulary) is {expected:.4f}"
        # Not turned round into a > for the warning: a loss that is NaN has to take that branch.
        if abs(loss - expected) <= LARGEST_DEVIATION * expected:
            yield seen.event("first_loss", text, loss=loss, expected=expected)
        else:
            advice = "look at the init std, and at whether model.vocab_size is that of the data"
            yield seen.event("warning", f"{text}: over 10% off; {advice}", loss=loss, expected=expected)


class Headroom(Monitor):
    """Warns where an activation or attention logit passes a share of the number format's maximum (65,504 in fp16)."""

    def observe(self, seen: Seen) -> Iterator[Event]:
        """Yield a warning at a watched step that reaches the share."""
        watched = seen.result.watched
        if watched is None or watched.headroom < self.plan.run.megastable.monitors.headroom_warning:
            return
        values = watched.layers[watched.headroom_layer]
        # Blocks alone have attention logits.
        kind = max(("max_activation", "max_attention_logit"), key=lambda name: values.get(name, 0.0))
        number_format = self.plan.run.number_format
        if math.isfinite(watched.headroom):
            share = f"{watched.headroom:.0%} of what {number_format} can hold: it may overflow soon"
        else:
            share = f"more than {number_format} can hold"
        yield seen.event(
            "warning",
            f"{kind} of {watched.headroom_layer} is {values[kind]:.4g}, {share}",
            layer=watched.headroom_layer,
            headroom=watched.headroom,
        )


class LossVolatility(Monitor):
    """Measures ``loss_volatility``: the robust standard deviation of the loss from step to step, over 64 steps."""

    metric_names = ("loss_volatility",)

    def __init__(self, plan: PlannedRun) -> None:
        super().__init__(plan)
        self._losses = RollingDeviation(WINDOW_STEPS)

    def observe(self, seen: Seen) -> Iterator[Event]:
        """Remember the loss. A volatile loss is no event: what is usual depends on the batch and on the data."""
        self._losses.add(seen.result.loss)
        yield from ()  # makes a generator of a function that has nothing to yield

    def values(self) -> dict[str, float]:
        """Return the deviation, once three losses are known."""
        deviation = self._losses.deviation
        if deviation is None:
            return {}
        return {"loss_volatility": deviation}

    def state_dict(self) -> dict[str, Any]:
        """Return the losses of the window, oldest first."""
        return {"losses": self._losses.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the losses of the window."""
        self._losses = RollingDeviation(WINDOW_STEPS, state["losses"])


class SkippedSteps(Monitor):
    """Reports skipped steps, and stops the run after too many consecutive ones that no lower loss scale can end.

    Counted are skips at which the loss scale cannot fall: it is at its minimum, fixed, or not used in this format.
    While it still falls, skips are how a dynamic scale finds its value.
    """

    def __init__(self, plan: PlannedRun) -> None:
        super().__init__(plan)
        self._fp16 = plan.run.fp16
        self._consecutive_skips = 0

    def observe(self, seen: Seen) -> Iterator[Event]:
        """Yield an event for a skip, and one that stops the run after too many of them."""
        # A diagnosis needs to say in which layer the numbers left the format; a skip seldom comes alone.
        self.should_watch_next_step = seen.result.skipped
        if not seen.result.skipped:
            self._consecutive_skips = 0
            return
        scale = seen.result.loss_scale
        if seen.result.vetoed:
            # The event of whoever vetoed it has told.
            self._consecutive_skips += 1
            yield from self._stop_after_too_many(seen)
            return
        reason = reason_of_skip(seen.result.grad_norm)
        overflowed = self._fp16.enabled and not math.isfinite(seen.result.grad_norm)
        if overflowed:
            yield seen.event("overflow", f"{reason} at loss scale {scale:g}: the step was skipped", loss_scale=scale)
        else:
            # bf16 has the range of fp32, and a loss is not scaled: here it is not the format that is too small.
            yield seen.event("skip", f"{reason}: the step was skipped", loss_scale=scale)
        if overflowed and self._fp16.can_fall(scale):
            self._consecutive_skips = 0
        else:
            self._consecutive_skips += 1
        yield from self._stop_after_too_many(seen)

    def _stop_after_too_many(self, seen: Seen) -> Iterator[Event]:
        skips = self._consecutive_skips
        if skips >= self.plan.run.megastable.monitors.max_skips_at_min_scale:
            data = {"skips_in_a_row": skips, "loss_scale": seen.result.loss_scale}
            yield seen.event(STOP, self._diagnosis(seen), **data)

    def state_dict(self) -> dict[str, Any]:
        """Return the count of skips, and whether the next step should be watched."""
        return {
            "consecutive_skips": self._consecutive_skips,
            "should_watch_next_step": self.should_watch_next_step,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the count of skips."""
        # Checkpoints that were written before these two names were chosen still have to load.
        if "hopeless" in state:
            state = {"consecutive_skips": state["hopeless"], "should_watch_next_step": state["wants_a_look"]}
        self._consecutive_skips = state["consecutive_skips"]
        self.should_watch_next_step = state["should_watch_next_step"]

    def _diagnosis(self, seen: Seen) -> str:
        if not self._fp16.enabled:
            scale = "there is no loss scale that could fall"
        elif self._fp16.loss_scale:
            scale = f"the loss scale is fixed at {self._fp16.loss_scale:g}"
        else:
            scale = f"the loss scale is at its minimum, fp16.min_loss_scale = {self._fp16.min_loss_scale}"
        reason = reason_of_skip(seen.result.grad_norm)
        skips = f"{self._consecutive_skips} steps in a row were skipped, the last, step {seen.state.step}, because"
        if seen.result.vetoed:
            return (
                f"{skips} loss or gradient norm stood out from the steps before. What stays like that is no bad batch: "
                "the weights are harmed, or the data has changed. Go on from a checkpoint before the first of them, "
                'with megastable.stability.guard "rollback" or a lower learning rate.'
            )
        if math.isfinite(seen.result.grad_norm):
            return (
                f"{skips} {reason}. So look at the data: an id of a token that the vocabulary does not have gives such "
                "a loss. The weights are those before these steps. Go on from a checkpoint before the first of them."
            )
        advice = "a lower learning rate, a longer warmup or a smaller init std"
        if self._fp16.enabled:
            advice += "; on a device that has bf16, take that instead of fp16"
        return (
            f"{skips} {reason}, and {scale}. {self._where_it_overflows(seen.result.watched)} The weights are those "
            f"before these steps. Go on from a checkpoint before the first of them with {advice}."
        )

    def _where_it_overflows(self, watched: Watched | None) -> str:
        """Name the first layer whose forward pass is not finite, or the one that is nearest to the limit."""
        if watched is None:
            return "The step was not watched, so which layer is the cause is not known."
        # Layers come in the order of the forward pass: a later one that is not finite may only pass on what an earlier
        # one began.
        for name, values in watched.layers.items():
            for kind in ("max_attention_logit", "max_activation"):  # a block computes its logits first
                if values.get(kind, 0.0) == math.inf:
                    return (
                        f"The forward pass is the cause: {kind} of {name}{self._stage_of(name)}, the first such layer, "
                        "is not finite."
                    )
        return (
            f"The forward pass is finite: its largest value, in {watched.headroom_layer}"
            f"{self._stage_of(watched.headroom_layer)}, is at {watched.headroom:.1%} of the format's maximum. The "
            "gradients overflow on their way back."
        )

    def _stage_of(self, layer: str) -> str:
        """Name the stage of a layer, as the end of its name."""
        names = [flat.name for flat in self.plan.cut.layers]
        stage = bisect_right(self.plan.cut.bounds, names.index(layer)) - 1
        return f" (stage {stage} of {self.plan.layout.num_stages})"


def reason_of_skip(grad_norm: float) -> str:
    """Say what was not finite in a skipped step of this gradient norm, as the beginning of a sentence."""
    # Of a batch with one label that counts, the gradient is never exactly zero.
    if grad_norm == 0:
        return "the batch has no token to learn from"
    if math.isfinite(grad_norm):
        return "the loss was not finite, though every gradient was"
    return "a gradient was not finite"
