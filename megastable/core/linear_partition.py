"""Cutting a list of numbers into consecutive parts: the exact problem, and DeepSpeed's two answers to it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate


def least_largest_sum(values: Sequence[int], num_parts: int) -> tuple[int, ...]:
    """Bounds of consecutive parts, none of them empty, whose largest sum is the least possible.

    Of several such, the one with the least sum of squares; then the one whose last parts are lightest. The limit is
    found by bisection, the parts under it by dynamic programming.

    Raises:
        ValueError: fewer values than parts.
    """
    if not 1 <= num_parts <= len(values):
        raise ValueError(f"{len(values)} values make no {num_parts} parts")
    before = [0, *accumulate(values)]
    low, high = max(values), before[-1]
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _fits(values, num_parts, middle) else (middle + 1, high)
    return _least_squares(before, num_parts, low)


def _fits(values: Sequence[int], num_parts: int, limit: int) -> bool:
    """Whether so many parts are enough when each takes all it may; fewer can always be cut further."""
    parts, filled = 1, 0
    for value in values:
        parts, filled = (parts, filled + value) if filled + value <= limit else (parts + 1, value)
    return parts <= num_parts


def _least_squares(before: Sequence[int], num_parts: int, limit: int) -> tuple[int, ...]:
    """The parts of least sum of squares among those with no sum above the limit; ``before`` are cumulative sums."""
    count = len(before) - 1
    best: dict[int, int] = {0: 0}  # stop of the parts so far -> least sum of squares
    starts: list[dict[int, int]] = []  # for every part, its stop -> the start that gives it
    for part in range(1, num_parts + 1):
        squares: dict[int, int] = {}
        chosen: dict[int, int] = {}
        for stop in [count] if part == num_parts else range(part, count - num_parts + part + 1):
            for start in range(stop - 1, part - 2, -1):  # the lightest part first, which stays where others equal it
                own = before[stop] - before[start]
                if own > limit:
                    break
                if start in best and best[start] + own * own < squares.get(stop, math.inf):
                    squares[stop], chosen[stop] = best[start] + own * own, start
        starts.append(chosen)
        best = squares
    bounds = [count]
    for chosen in reversed(starts):
        bounds.append(chosen[bounds[-1]])
    return tuple(reversed(bounds))


def deepspeed_uniform(count: int, num_parts: int) -> tuple[int, ...]:
    """``deepspeed.runtime.utils.partition_uniform``: equal counts; the first parts take the remainder."""
    if count <= num_parts:
        return tuple(min(part, count) for part in range(num_parts + 1))
    each, remainder = divmod(count, num_parts)
    return tuple(part * each + min(part, remainder) for part in range(num_parts + 1))


def deepspeed_balanced(weights: Sequence[int], num_parts: int) -> tuple[int, ...]:
    """``deepspeed.runtime.utils.partition_balanced``: a small difference between largest and smallest part.

    Its dynamic programming keeps for every prefix the parts of least difference, the last of them where several are
    equal, which is not always the best of the whole; the bounds have to be the same as its own.
    """
    count = len(weights)
    if count <= num_parts:
        return deepspeed_uniform(count, num_parts)
    before = [0, *accumulate(weights)]
    # For the parts so far, by stop: largest part, smallest part. A prefix that cannot be cut so has an infinite one.
    largest: list[float] = [0.0] + [math.inf] * count
    smallest: list[float] = [math.inf] * (count + 1)
    starts: list[list[int]] = []
    for part in range(1, num_parts + 1):
        new_largest, new_smallest, chosen = [math.inf] * (count + 1), [math.inf] * (count + 1), [0] * (count + 1)
        for stop in range(part, count + 1):
            least = math.inf
            for start in range(stop):
                own = before[stop] - before[start]
                high, low = max(largest[start], own), min(smallest[start], own)
                if high - low <= least:
                    least = high - low
                    new_largest[stop], new_smallest[stop], chosen[stop] = high, low, start
        starts.append(chosen)
        largest, smallest = new_largest, new_smallest
    bounds = [count]
    for chosen in reversed(starts):
        bounds.append(chosen[bounds[-1]])
    return tuple(reversed(bounds))
