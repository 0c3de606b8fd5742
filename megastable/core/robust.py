"""Statistics that a single outlier does not move."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque

NORMAL_CONSISTENCY = 1.4826
"""Ratio of the standard deviation to the median absolute deviation, of normally distributed values."""


class RollingDeviation:
    """Estimates the standard deviation of a series around its own trend, over a window.

    The estimate is 1.4826 times the median absolute difference of neighbours, over sqrt(2) for the two values in a
    difference. A slow trend does not count as volatility, and one spike does not move it.
    """

    def __init__(self, window: int, values: list[float] | None = None) -> None:
        self._values: deque[float] = deque(values or [], maxlen=window)

    def add(self, value: float) -> None:
        """Take in the next value; one that is not finite is left out."""
        # An overflowing step has an infinite norm. Every difference with it would be infinite or NaN.
        if math.isfinite(value):
            self._values.append(value)

    @property
    def values(self) -> list[float]:
        """Return the window, oldest first."""
        return list(self._values)

    @property
    def deviation(self) -> float | None:
        """Compute the deviation; None before there are three values."""
        values = self.values
        # Fewer give at most one difference, which is no estimate of how they spread.
        if len(values) < 3:
            return None
        changes = [abs(after - before) for before, after in itertools.pairwise(values)]
        return NORMAL_CONSISTENCY * statistics.median(changes) / math.sqrt(2)
