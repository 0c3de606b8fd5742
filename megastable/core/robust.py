"""Statistics that a single outlier does not move."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque
from collections.abc import Sequence

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


class WindowOfBatches:
    """Holds the last values of a number that is a mean over a batch, and tells how far another one is from them.

    The noise of such a mean falls with the root of the batch, which a ramp lets grow, so that distances from the middle
    are compared times the root of their batch.
    """

    def __init__(self, window: int, values: Sequence[tuple[float, int]] = ()) -> None:
        self._values: deque[tuple[float, int]] = deque(values, maxlen=window)

    def add(self, value: float, batch_size: int) -> None:
        """Take in the next value."""
        self._values.append((value, batch_size))

    @property
    def values(self) -> list[tuple[float, int]]:
        """Return values and batch sizes, oldest first."""
        return list(self._values)

    @property
    def median(self) -> float:
        """Return the middle of the values.

        Raises:
            StatisticsError: there are none.
        """
        return statistics.median(value for value, _ in self._values)

    def deviations(self, value: float, batch_size: int, least_deviation: float) -> float:
        """Return how many standard deviations ``value`` is above the median; negative below it.

        The standard deviation is 1.4826 times the median absolute deviation.

        Args:
            least_deviation: is assumed where the values are more equal than that, as they never stay.
        """
        median = self.median
        distances = [abs(other - median) * math.sqrt(size) for other, size in self._values]
        deviation = NORMAL_CONSISTENCY * statistics.median(distances) / math.sqrt(batch_size)
        return (value - median) / max(deviation, least_deviation)
