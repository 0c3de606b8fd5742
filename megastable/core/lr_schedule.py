"""Learning-rate schedules, keyed by samples so that a batch ramp never stretches them.

To add a schedule: a frozen ``DecaySchedule`` with ``share_left``, whose fields are what it reads, and a line in
``LR_SCHEDULES``. A field that no other schedule has needs its key in a run file as well: ``config.lr_schedule`` has the
keys, ``planning.run_plan.learning_rate_schedule`` their values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Self


@dataclass(frozen=True)
class WarmupSchedule:
    """Warms up linearly from 0 to ``max_lr``; a subclass adds what follows. Nothing decays during the warmup.

    ``warmup_samples`` may be 0: then the first step uses ``max_lr``.
    """

    max_lr: float
    warmup_samples: int

    def at(self, samples: int) -> float:
        """Return the learning rate of a step that starts after ``samples`` trained samples."""
        if samples < self.warmup_samples:
            return self.max_lr * samples / self.warmup_samples
        return self.after_warmup(samples)

    def after_warmup(self, samples: int) -> float:
        """Return the learning rate at ``samples >= warmup_samples``."""
        raise NotImplementedError

    def scaled(self, factor: float) -> Self:
        """Return the schedule with its peak, and so its warmup, multiplied by ``factor`` (above 0, at most 1)."""
        return replace(self, max_lr=self.max_lr * factor)


@dataclass(frozen=True)
class Constant(WarmupSchedule):
    """Stays at ``max_lr`` after the warmup: the one schedule that has no minimum for the last step to reach."""

    def after_warmup(self, samples: int) -> float:
        """Return ``max_lr``."""
        return self.max_lr


@dataclass(frozen=True)
class DecaySchedule(WarmupSchedule):
    """Falls after the warmup from ``max_lr`` to ``min_lr``, which holds from ``end_samples`` on.

    A decay without length (``end_samples <= warmup_samples``) is over when the warmup is.
    """

    min_lr: float
    end_samples: int

    def after_warmup(self, samples: int) -> float:
        """Return ``min_lr`` from the end on, whatever the shape; before it the shape's value."""
        if samples >= self.end_samples:
            return self.min_lr
        return self.before_end(samples)

    def before_end(self, samples: int) -> float:
        """Return the learning rate at ``warmup_samples <= samples < end_samples``."""
        # From above, because min_lr + (max_lr - min_lr) may round to more than max_lr.
        return self.max_lr - (self.max_lr - self.min_lr) * (1.0 - self.share_left(samples))

    def share_left(self, samples: int) -> float:
        """Return the share of ``max_lr - min_lr`` that is left, 1 to 0, where ``before_end`` is defined."""
        raise NotImplementedError

    def progress(self, samples: int, start: int) -> float:
        """Return how much of the way from ``start`` to ``end_samples`` is done, 0 to 1."""
        return (samples - start) / (self.end_samples - start)

    def scaled(self, factor: float) -> Self:
        """Return the schedule with its peak scaled, but not below ``min_lr``, which the last step still reaches."""
        return replace(self, max_lr=max(self.min_lr, self.max_lr * factor))


@dataclass(frozen=True)
class Cosine(DecaySchedule):
    """Falls along half a cosine (Loshchilov and Hutter, arXiv 1608.03983, equation 5, one cycle)."""

    def share_left(self, samples: int) -> float:
        """Return 1 to 0 along half a cosine."""
        return half_cosine(self.progress(samples, self.warmup_samples))


@dataclass(frozen=True)
class Linear(DecaySchedule):
    """Falls along a straight line."""

    def share_left(self, samples: int) -> float:
        """Return 1 to 0 along a line."""
        return 1.0 - self.progress(samples, self.warmup_samples)


@dataclass(frozen=True)
class InverseSqrt(DecaySchedule):
    """Falls as ``sqrt(warmup / samples)`` (Vaswani et al., arXiv 1706.03762, equation 3), made to end at ``min_lr``.

    The paper's curve reaches 0 nowhere. With ``r(s) = sqrt((warmup + 1) / (s + 1))`` the share left is
    ``(r(s) - r(end)) / (1 - r(end))``, 1 at the warmup's end and 0 at the decay's. Where ``min_lr`` is
    ``max_lr * r(end)``, this is the paper's curve itself. Samples are counted from 1, as the paper's steps are, which
    also gives a meaning to a warmup of 0: a very early and steep fall.
    """

    def share_left(self, samples: int) -> float:
        """Return 1 to 0 along an inverse square root."""
        # What the paper's curve still has at the end is taken off everywhere, and the rest is stretched back to 1.
        lowest = self._paper_share(self.end_samples)
        return (self._paper_share(samples) - lowest) / (1.0 - lowest)

    def _paper_share(self, samples: int) -> float:
        """Compute ``r(samples)``, the paper's share of the peak."""
        return math.sqrt((self.warmup_samples + 1) / (samples + 1))


@dataclass(frozen=True)
class Step(DecaySchedule):
    """Falls by ``step_factor`` each time ``step_interval_samples`` have passed since the warmup's end.

    The learning rate is ``max(min_lr, max_lr * step_factor ** k)`` (Ge et al., arXiv 1904.12838, algorithm 1, with a
    factor of a half). Wherever the factors have led, it falls to ``min_lr`` at ``end_samples``. An interval of 0 counts
    as one sample.
    """

    step_interval_samples: int
    step_factor: float

    def before_end(self, samples: int) -> float:
        """Apply the factors so far to the learning rate itself, not to what is above ``min_lr``."""
        num_intervals = (samples - self.warmup_samples) // max(1, self.step_interval_samples)
        return max(self.min_lr, self.max_lr * self.step_factor**num_intervals)


@dataclass(frozen=True)
class WarmupStableDecay(DecaySchedule):
    """Holds ``max_lr`` up to ``stable_samples`` (counted from the start of the run), then falls along half a cosine.

    Hu et al., MiniCPM, arXiv 2404.06395, section 4; Hägele et al., arXiv 2405.18392, who compare shapes of the decay.
    Where the warmup ends later than ``stable_samples``, the decay begins at the warmup's end.
    """

    stable_samples: int

    def share_left(self, samples: int) -> float:
        """Return 1 while stable, then 1 to 0 along half a cosine."""
        decay_start = max(self.warmup_samples, self.stable_samples)
        if samples <= decay_start:
            return 1.0
        return half_cosine(self.progress(samples, decay_start))


def half_cosine(progress: float) -> float:
    """Return 1 to 0 as ``progress`` goes from 0 to 1, flat at both ends."""
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
