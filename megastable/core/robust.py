"""Statistics that a single outlier does not move."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque

NORMAL_CONSISTENCY = 1.4826
"""Median absolute deviation to standard deviation, of normally distributed values."""


class RollingDeviation:
    """Robust standard deviation of the step-to-step changes of a series, over a window.

    1.4826 times the median absolute difference of neighbours, over sqrt(2) for the two values in a difference. A slow
    trend does not count as volatility, and one spike does not move it.
    """

    def __init__(self, window: int, values: list[float] | None = None) -> None:
        self._values: deque[float] = deque(values or [], maxlen=window)

    def add(self, value: float) -> None:
        """Take in the next value; one that is not finite is left out."""
        if math.isfinite(value):
            self._values.append(value)

    @property
    def values(self) -> list[float]:
        """The window, oldest first."""
        return list(self._values)

    @property
    def deviation(self) -> float | None:
        """None before there are three values."""
        values = self.values
        if len(values) < 3:
            return None
        changes = [abs(after - before) for before, after in itertools.pairwise(values)]
        return NORMAL_CONSISTENCY * statistics.median(changes) / math.sqrt(2)
