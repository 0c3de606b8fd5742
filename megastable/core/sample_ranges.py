"""Which positions in the order of the samples a step takes, where some ranges of them are left out."""

from __future__ import annotations

from collections.abc import Sequence

SampleRange = tuple[int, int]
"""The first position and the one after the last."""


def next_ranges(position: int, count: int, left_out: Sequence[SampleRange]) -> list[SampleRange]:
    """Return the ranges of the next ``count`` positions from ``position`` on that are in none of ``left_out``.

    Args:
        left_out: in any order; ranges may overlap.
    """
    found = []
    for first, after in sorted(left_out):
        if count == 0:
            break
        if after <= position:
            continue
        taken = min(count, max(0, first - position))
        if taken:
            found.append((position, position + taken))
            count -= taken
        if count:
            position = after
    if count:
        found.append((position, position + count))
    return found


def num_taken(first: int, after: int, left_out: Sequence[SampleRange]) -> int:
    """Count the positions from ``first`` to before ``after`` that are in none of ``left_out``; ranges may overlap."""
    taken = 0
    for begin, end in sorted(left_out):
        taken += max(0, min(begin, after) - first)
        first = max(first, end)
    return taken + max(0, after - first)
