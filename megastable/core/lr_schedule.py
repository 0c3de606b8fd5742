"""Learning-rate schedules, keyed by samples so that a batch ramp never stretches them.

A schedule is an object with ``at(samples) -> learning rate``. To add one: a frozen dataclass whose fields are what it
reads, and a line in ``LR_SCHEDULES``; a field that no other schedule has needs its key in a run file as well.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Self


@dataclass(frozen=True)
class WarmupSchedule:
    """Linear warmup from 0 to ``max_lr``; what follows is the subclass's. Nothing decays during the warmup.

    ``warmup_samples`` may be 0: then the first step uses ``max_lr``.
    """

    max_lr: float
    warmup_samples: int

    def at(self, samples: int) -> float:
        """Learning rate of a step that starts after ``samples`` trained samples."""
        if samples < self.warmup_samples:
            return self.max_lr * samples / self.warmup_samples
        return self.after_warmup(samples)

    def after_warmup(self, samples: int) -> float:
        """Learning rate at ``samples >= warmup_samples``."""
        raise NotImplementedError

    def scaled(self, factor: float) -> Self:
        """The same schedule with its peak, and with it the warmup, multiplied by ``factor`` (above 0, at most 1)."""
        return replace(self, max_lr=self.max_lr * factor)


@dataclass(frozen=True)
class Constant(WarmupSchedule):
    """``max_lr`` for ever after the warmup: the one schedule that has no minimum for the last step to reach."""

    def after_warmup(self, samples: int) -> float:
        """Nothing decays."""
        return self.max_lr


@dataclass(frozen=True)
class DecaySchedule(WarmupSchedule):
    """After the warmup from ``max_lr`` down to ``min_lr``, which holds from ``end_samples`` on.

    A decay without length (``end_samples <= warmup_samples``) is over when the warmup is.
    """

    min_lr: float
    end_samples: int

    def after_warmup(self, samples: int) -> float:
        """``min_lr`` from the end on, whatever the shape; before it the shape's value."""
        return self.min_lr if samples >= self.end_samples else self.before_end(samples)

    def before_end(self, samples: int) -> float:
        """Learning rate at ``warmup_samples <= samples < end_samples``."""
        # From above, because min_lr + (max_lr - min_lr) may round to more than max_lr.
        return self.max_lr - (self.max_lr - self.min_lr) * (1.0 - self.share_left(samples))

    def share_left(self, samples: int) -> float:
        """Share of ``max_lr - min_lr`` that is left, from 1 to 0, at ``warmup_samples <= samples < end_samples``."""
        raise NotImplementedError

    def progress(self, samples: int, start: int) -> float:
        """How much of the way from ``start`` to ``end_samples`` is done, 0 to 1."""
        return (samples - start) / (self.end_samples - start)

    def scaled(self, factor: float) -> Self:
        """The peak scaled, but never below ``min_lr``; the minimum stays, so that the last step reaches it."""
        return replace(self, max_lr=max(self.min_lr, self.max_lr * factor))


@dataclass(frozen=True)
class Cosine(DecaySchedule):
    """Half a cosine (Loshchilov and Hutter, arXiv 1608.03983, equation 5, one cycle)."""

    def share_left(self, samples: int) -> float:
        """1 to 0 along half a cosine."""
        return half_cosine(self.progress(samples, self.warmup_samples))


@dataclass(frozen=True)
class Linear(DecaySchedule):
    """A straight line."""

    def share_left(self, samples: int) -> float:
        """1 to 0 along a line."""
        return 1.0 - self.progress(samples, self.warmup_samples)


@dataclass(frozen=True)
class InverseSqrt(DecaySchedule):
    """``sqrt(warmup / samples)`` (Vaswani et al., arXiv 1706.03762, equation 3), stretched to end at ``min_lr``.

    The paper's curve never arrives anywhere. With ``r(s) = sqrt((warmup + 1) / (s + 1))`` the share left is
    ``(r(s) - r(end)) / (1 - r(end))``, 1 at the warmup's end and 0 at the decay's. Where ``min_lr`` is
    ``max_lr * r(end)``, this is the paper's curve itself. Samples are counted from 1, as the paper's steps are, which
    also gives a meaning to a warmup of 0: a very early and steep fall.
    """

    def share_left(self, samples: int) -> float:
        """1 to 0 along an inverse square root."""
        lowest = self._paper_share(self.end_samples)
        return (self._paper_share(samples) - lowest) / (1.0 - lowest)

    def _paper_share(self, samples: int) -> float:
        return math.sqrt((self.warmup_samples + 1) / (samples + 1))


@dataclass(frozen=True)
class Step(DecaySchedule):
    """Multiplied by ``step_factor`` each time ``step_interval_samples`` have passed since the warmup's end.

    ``max(min_lr, max_lr * step_factor ** k)`` (Ge et al., arXiv 1904.12838, algorithm 1, with a factor of a half).
    Wherever the factors have led, the learning rate falls to ``min_lr`` at ``end_samples``. An interval of 0 counts as
    one sample.
    """

    step_interval_samples: int
    step_factor: float

    def before_end(self, samples: int) -> float:
        """The factors so far, applied to the learning rate itself and not to what is above ``min_lr``."""
        num_intervals = (samples - self.warmup_samples) // max(1, self.step_interval_samples)
        return max(self.min_lr, self.max_lr * self.step_factor**num_intervals)


@dataclass(frozen=True)
class WarmupStableDecay(DecaySchedule):
    """``max_lr`` up to ``stable_samples`` (counted from the start of the run), then half a cosine.

    Hu et al., MiniCPM, arXiv 2404.06395, section 4; Hägele et al., arXiv 2405.18392, who compare shapes of the decay.
    Where the warmup ends later than ``stable_samples``, the decay begins at the warmup's end.
    """

    stable_samples: int

    def share_left(self, samples: int) -> float:
        """1 while stable, then 1 to 0 along half a cosine."""
        decay_start = max(self.warmup_samples, self.stable_samples)
        return half_cosine(self.progress(samples, decay_start)) if samples > decay_start else 1.0


def half_cosine(progress: float) -> float:
    """1 to 0 as ``progress`` goes from 0 to 1."""
    return 0.5 * (1.0 + math.cos(math.pi * progress))


LR_SCHEDULES: dict[str, type[WarmupSchedule]] = {
    "constant": Constant,
    "cosine": Cosine,
    "inverse_sqrt": InverseSqrt,
    "linear": Linear,
    "step": Step,
    "warmup_stable_decay": WarmupStableDecay,
}

BATCH_SCALING_EXPONENTS: dict[str, float] = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}
"""The peak of a step is multiplied by (its global batch / the ramp's final one) to this power.

linear: Goyal et al., arXiv 1706.02677, section 2.1 (for SGD); sqrt: Malladi et al., arXiv 2205.10287 (for Adam).
"""
