"""Which source of a blend a sample is from: weights over sources, kept to within one sample at every prefix.

After n samples a source of share w has had more than n*w - 1 and fewer than n*w + 1. So its k-th sample (counting from
1) has a first and a last place that it may take: floor((k - 1) / w) + 1 and ceil(k / w). Taking, at every place, the
sample whose last place is nearest among those that may already be taken always works (Liu and Layland's earliest
deadline first, for the windows of Baruah et al., "Proportionate progress", 1996). Where the weights are whole numbers
that sum to D, all of this repeats after D samples, so that one period answers for every position.
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections.abc import Sequence
from fractions import Fraction

LONGEST_PERIOD = 1_000_000
"""Samples; a table of them takes a second to make and 6 MB."""


def whole_weights(weights: Sequence[float]) -> list[int]:
    """Return the smallest whole numbers in the ratio of ``weights``, read as the decimals that were written."""
    exact = [Fraction(str(weight)) for weight in weights]
    denominator = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * denominator) for weight in exact]
    divisor = math.gcd(*whole)
    return [weight // divisor for weight in whole]


class Blend:
    """Says for any position of a run which source it reads, and how many samples of that source come before."""

    def __init__(self, weights: Sequence[float]) -> None:
        """Lay out one period.

        Args:
            weights: one for each source, above 0, in any unit.

        Raises:
            ValueError: the weights repeat only after more than ``LONGEST_PERIOD`` samples.
        """
        self.weights = whole_weights(weights)
        self.period = sum(self.weights)
        if self.period > LONGEST_PERIOD:
            raise ValueError(f"the weights repeat after {self.period:,} samples, more than {LONGEST_PERIOD:,}")
        self._sources, self._counts = _one_period(self.weights)

    def at(self, position: int) -> tuple[int, int]:
        """Return the source of the sample at ``position`` (>= 0), and the samples of that source before it."""
        periods, place = divmod(position, self.period)
        source = self._sources[place]
        return source, periods * self.weights[source] + self._counts[place]

    def most_of(self, source: int, num_samples: int) -> int:
        """Return a bound on the samples of ``source`` among any ``num_samples`` in a row."""
        # Each end of the row is off by less than one sample.
        return min(num_samples, num_samples * self.weights[source] // self.period + 2)


def _one_period(weights: Sequence[int]) -> tuple[array[int], array[int]]:
    """Return the source at every place of a period, and how many samples of that source come before."""
    period = sum(weights)
    taken = [0] * len(weights)
    # (first place, source) of samples that may not be taken yet, and (last place, source) of those that may.
    waiting = [(1, source) for source in range(len(weights))]
    ready: list[tuple[int, int]] = []
    sources = array("H")
    counts = array("I")
    for place in range(1, period + 1):
        while waiting and waiting[0][0] <= place:
            _, source = heapq.heappop(waiting)
            last_place = -(-(taken[source] + 1) * period // weights[source])
            heapq.heappush(ready, (last_place, source))
        _, source = heapq.heappop(ready)
        sources.append(source)
        counts.append(taken[source])
        taken[source] += 1
        heapq.heappush(waiting, (taken[source] * period // weights[source] + 1, source))
    return sources, counts
