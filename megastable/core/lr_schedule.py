"""Learning-rate schedules, keyed by samples so that a batch ramp never stretches them.

A schedule is an object with ``at(samples) -> learning rate``. To add one: a class with ``decay_factor``, a line in
``LR_SCHEDULES``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class WarmupSchedule:
    """Linear warmup from 0 to ``max_lr``, then ``decay_factor`` takes it to ``min_lr`` at ``end_samples``.

    Nothing decays during the warmup. ``warmup_samples`` may be 0 (the first step uses ``max_lr``), and ``min_lr``
    holds from ``end_samples`` on.
    """

    max_lr: float
    min_lr: float
    warmup_samples: int
    end_samples: int

    def at(self, samples: int) -> float:
        """Learning rate of a step that starts after ``samples`` trained samples."""
        if samples < self.warmup_samples:
            return self.max_lr * samples / self.warmup_samples
        decay_samples = self.end_samples - self.warmup_samples
        progress = min(1.0, (samples - self.warmup_samples) / decay_samples) if decay_samples > 0 else 1.0
        return self.min_lr + (self.max_lr - self.min_lr) * self.decay_factor(progress)

    def decay_factor(self, progress: float) -> float:
        """Share of ``max_lr - min_lr`` that is left at ``progress`` (0 to 1) through the decay."""
        raise NotImplementedError


class Constant(WarmupSchedule):
    """``max_lr`` for ever after the warmup; ``min_lr`` plays no part."""

    def decay_factor(self, progress: float) -> float:
        """Nothing decays."""
        return 1.0


class Cosine(WarmupSchedule):
    """Half a cosine (Loshchilov and Hutter, arXiv 1608.03983, equation 5, one cycle)."""

    def decay_factor(self, progress: float) -> float:
        """1 to 0 along half a cosine."""
        return 0.5 * (1.0 + math.cos(math.pi * progress))


class Linear(WarmupSchedule):
    """A straight line."""

    def decay_factor(self, progress: float) -> float:
        """1 to 0 along a line."""
        return 1.0 - progress


LR_SCHEDULES: dict[str, type[WarmupSchedule]] = {"constant": Constant, "cosine": Cosine, "linear": Linear}
