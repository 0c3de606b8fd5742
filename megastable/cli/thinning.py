"""Fewer values of a long run, such that the extremes stay."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

FEWEST_POINTS = 5
"""The two ends, and three of one bucket."""


def thinned(values: Sequence[float | None], most: int) -> list[int]:
    """Return the indices of at most ``most`` values, in order: all of them, or the ends and what stands out between.

    The values are cut into buckets of neighbours. Of each stay the smallest, the largest, and the first that is None,
    which stands for one that is not finite.

    Raises:
        ValueError: ``most`` is less than ``FEWEST_POINTS``.
    """
    if most < FEWEST_POINTS:
        raise ValueError(f"at least {FEWEST_POINTS} points, not {most}")
    if len(values) <= most:
        return list(range(len(values)))
    kept = {0, len(values) - 1}
    for start, stop in pairwise(bucket_bounds(len(values), (most - 2) // 3)):
        kept.update(_standing_out(values, range(start, stop)))
    return sorted(kept)


def bucket_bounds(count: int, buckets: int) -> list[int]:
    """Return the first index of each of ``buckets`` nearly equal buckets of ``count`` values, and the end."""
    # Integers, so that no value falls between two buckets.
    return [index * count // buckets for index in range(buckets + 1)]


def _standing_out(values: Sequence[float | None], bucket: range) -> list[int]:
    finite = []
    not_finite = []
    for index in bucket:
        value = values[index]
        if value is None:
            not_finite.append(index)
        else:
            finite.append((value, index))
    found = not_finite[:1]
    if finite:
        found += [min(finite)[1], max(finite)[1]]
    return found
