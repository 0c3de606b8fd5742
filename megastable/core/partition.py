"""Where the flat list of layers is cut into pipeline stages.

A cut is given by its bounds: ``num_stages + 1`` indices into the list; stage i holds ``[bounds[i], bounds[i + 1])``.
Every way to cut asks for consecutive parts of a list of numbers, one a layer, which come first: the exact answer, and
DeepSpeed's two.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

from megastable.core.layers import FlatLayer


def least_largest_sum(values: Sequence[int], num_parts: int) -> tuple[int, ...]:
    """Find the bounds of consecutive parts, none of them empty, whose largest sum is the least possible.

    Of several such, return the one with the least sum of squares; then the one whose last parts are lightest. The limit
    is found by bisection, the parts under it by dynamic programming.

    Raises:
        ValueError: fewer values than parts.
    """
    if not 1 <= num_parts <= len(values):
        raise ValueError(f"{len(values)} values make no {num_parts} parts")
    sums_before = [0, *accumulate(values)]  # sums_before[i] is the sum of values[:i]
    # No limit below the largest value can work; the sum of all always does.
    low = max(values)
    high = sums_before[-1]
    while low < high:
        middle = (low + high) // 2
        if _fits(values, num_parts, middle):
            high = middle
        else:
            low = middle + 1
    return _least_squares(sums_before, num_parts, low)


def _fits(values: Sequence[int], num_parts: int, limit: int) -> bool:
    """Tell whether ``num_parts`` parts are enough when each is filled up to ``limit`` before the next begins.

    Where fewer are enough, they can be cut further: that makes no sum larger.
    """
    parts = 1
    filled = 0
    for value in values:
        if filled + value <= limit:
            filled += value
        else:
            parts += 1
            filled = value
    return parts <= num_parts


def _least_squares(sums_before: Sequence[int], num_parts: int, limit: int) -> tuple[int, ...]:
    """Find the parts of least sum of squares among those of which none sums to more than ``limit``.

    The parts are laid from the front, one after the other. For each place where the parts so far may stop, only the
    best way to get there is kept: what follows does not depend on how it was reached.

    The best start of a part moves to the right as its stop does, and as the parts before it become more. So it lies
    between that of a stop further left after one part less, and that of the next stop to the right: altogether n^2
    starts are tried instead of n^3 (Yao, "Speed-up in dynamic programming", 1982; a square of a sum meets its
    quadrangle inequality).

    Args:
        sums_before: ``sums_before[i]`` is the sum of the first i values.
    """
    count = len(sums_before) - 1
    least: dict[int, int] = {0: 0}  # stop of the parts so far -> least sum of their squares
    starts: list[dict[int, int]] = []  # for each part, its stop -> the start that gives the least
    chosen: dict[int, int] = {}
    for part in range(1, num_parts + 1):
        # Each part needs a value, those before this one and those after; the last part takes all that are left.
        last_stop = count - (num_parts - part)
        first_stop = part if part < num_parts else count
        # Under the limit, neither the parts so far nor those that follow hold more than so many of it.
        last_stop = min(last_stop, bisect_right(sums_before, part * limit) - 1)
        first_stop = max(first_stop, bisect_left(sums_before, sums_before[-1] - (num_parts - part) * limit))
        squares: dict[int, int] = {}
        chosen_before = chosen
        chosen = {}
        rightmost = last_stop - 1
        for stop in range(last_stop, first_stop - 1, -1):
            leftmost = chosen_before.get(stop, part - 1)
            # Starts from the right give the lightest last part first, which then stays where others only equal it.
            for start in range(min(stop - 1, rightmost), leftmost - 1, -1):
                own = sums_before[stop] - sums_before[start]
                if own > limit:
                    break  # the starts further left are heavier still
                if start not in least:
                    continue
                total = least[start] + own * own
                if total < squares.get(stop, math.inf):
                    squares[stop] = total
                    chosen[stop] = start
            rightmost = chosen.get(stop, rightmost)
        starts.append(chosen)
        least = squares
    return _traced_back(starts, count)


def _traced_back(starts: Sequence[Sequence[int] | dict[int, int]], count: int) -> tuple[int, ...]:
    """Follow the chosen starts from the end of the list to its beginning; they are the bounds."""
    bounds = [count]
    for chosen in reversed(starts):
        bounds.append(chosen[bounds[-1]])
    return tuple(reversed(bounds))


def deepspeed_uniform(count: int, num_parts: int) -> tuple[int, ...]:
    """Cut into equal counts, the first parts taking the remainder: ``deepspeed.runtime.utils.partition_uniform``."""
    if count <= num_parts:
        return tuple(min(part, count) for part in range(num_parts + 1))
    each, remainder = divmod(count, num_parts)
    return tuple(part * each + min(part, remainder) for part in range(num_parts + 1))


def deepspeed_balanced(weights: Sequence[int], num_parts: int) -> tuple[int, ...]:
    """Cut for a small difference between the largest and the smallest part.

    This is ``deepspeed.runtime.utils.partition_balanced``, and the bounds have to be the same as its own. Its dynamic
    programming keeps for every prefix the parts of least difference, the last of them where several are equal. That is
    not always the best of the whole: another way to cut the prefix may go better with what follows.
    """
    count = len(weights)
    if count <= num_parts:
        return deepspeed_uniform(count, num_parts)
    sums_before = [0, *accumulate(weights)]
    # By the stop of the parts so far: their largest and their smallest sum. A prefix that has too few weights for so
    # many parts keeps infinities, which no part beats.
    largest: list[float] = [0.0] + [math.inf] * count
    smallest: list[float] = [math.inf] * (count + 1)
    starts: list[list[int]] = []
    for part in range(1, num_parts + 1):
        new_largest = [math.inf] * (count + 1)
        new_smallest = [math.inf] * (count + 1)
        chosen = [0] * (count + 1)
        for stop in range(part, count + 1):
            least = math.inf
            for start in range(stop):
                own = sums_before[stop] - sums_before[start]
                high = max(largest[start], own)
                low = min(smallest[start], own)
                if high - low <= least:  # <=, as there: the last of equal cuts stays
                    least = high - low
                    new_largest[stop] = high
                    new_smallest[stop] = low
                    chosen[stop] = start
        starts.append(chosen)
        largest = new_largest
        smallest = new_smallest
    return _traced_back(starts, count)


# A search over layouts, and every rule of a run file, asks for the same cuts again.
_least_largest_sum = lru_cache(maxsize=512)(least_largest_sum)
_deepspeed_balanced = lru_cache(maxsize=512)(deepspeed_balanced)

LAYERS_AT_EACH_END = 2
"""Embedding and embedding finish stand before the blocks, final norm and head after them."""
FIRST_CUT = LAYERS_AT_EACH_END + 1
"""The first place where ``balanced`` may cut, which is behind the first block."""
TYPE_PREFIX = "type:"

Partition = str | tuple[int, ...]
"""A name of ``PARTITIONS``, ``type:regex``, or the number of blocks of every stage."""


def balanced(layers: Sequence[FlatLayer], num_stages: int) -> tuple[int, ...]:
    """Make the most expensive stage as cheap as it can be, then the stages as equal as they can be.

    Cuts fall behind a block: the embedding, which costs next to nothing, stays with the first one, and the final norm
    with the head, which may have a stage of their own.

    Raises:
        ValueError: more stages than blocks and head.
    """
    costs = [layer.cost for layer in layers]
    # What is never cut apart is one item: embedding, its finish and the first block; final norm and head.
    items = (sum(costs[:FIRST_CUT]), *costs[FIRST_CUT:-LAYERS_AT_EACH_END], sum(costs[-LAYERS_AT_EACH_END:]))
    bounds = _least_largest_sum(items, num_stages)
    # Item i ends where layer i + FIRST_CUT - 1 begins, since the first item holds FIRST_CUT layers.
    inner = [bound + FIRST_CUT - 1 for bound in bounds[1:-1]]
    return (0, *inner, len(layers))


def uniform(layers: Sequence[FlatLayer], num_stages: int) -> tuple[int, ...]:
    """Give every stage as many layers, whatever they cost: DeepSpeed's ``uniform``."""
    return deepspeed_uniform(len(layers), num_stages)


def by_parameters(layers: Sequence[FlatLayer], num_stages: int) -> tuple[int, ...]:
    """Give every stage as many weights: DeepSpeed's ``parameters``."""
    return _deepspeed_balanced(tuple(layer.num_parameters for layer in layers), num_stages)


PARTITIONS: dict[str, Callable[[Sequence[FlatLayer], int], tuple[int, ...]]] = {
    "balanced": balanced,
    "uniform": uniform,
    "parameters": by_parameters,
}
"""To add a method: a function from the layers and the number of stages to the bounds, and a line here."""


def stage_bounds(layers: Sequence[FlatLayer], num_stages: int, partition: Partition) -> tuple[int, ...]:
    """Return the bounds of a cut. Those that are not ``balanced`` may leave ``illegal_stages``.

    Raises:
        KeyError: no such method.
        ValueError: ``balanced`` with more stages than blocks and head.
        re.error: ``type:`` with what is no regular expression.
    """
    if not isinstance(partition, str):
        return _by_block_counts(partition, len(layers))
    if partition.startswith(TYPE_PREFIX):
        # DeepSpeed's ``type:`` shares out the layers of a class and does not look at the others.
        pattern = partition.removeprefix(TYPE_PREFIX)
        weights = tuple(int(matches_type(layer.class_name, pattern)) for layer in layers)
        return _deepspeed_balanced(weights, num_stages)
    return PARTITIONS[partition](layers, num_stages)


def _by_block_counts(counts: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Cut so that stage i has ``counts[i]`` blocks, and both ends of the model what stands beside their blocks."""
    ends = [LAYERS_AT_EACH_END + blocks for blocks in accumulate(counts)]
    return (0, *ends[:-1], num_layers)


# The layers of a model have few classes, and each is asked for once a layer.
@lru_cache(maxsize=512)
def matches_type(class_name: str, pattern: str) -> bool:
    """Tell whether ``type:pattern`` counts a class: it matches anywhere in the name, in whatever case."""
    return re.search(pattern, class_name, re.IGNORECASE) is not None


def illegal_stages(layers: Sequence[FlatLayer], bounds: Sequence[int]) -> list[int]:
    """Number the stages that lack matrices or vectors, which are the two groups of the optimizer.

    DeepSpeed drops the empty group, so that stages have unlike optimizers: some such cuts were seen to hang, others to
    train, depending on the number format. A stage with vectors has weights of its own: only matrices are tied.
    """
    illegal = []
    for number, (start, stop) in enumerate(pairwise(bounds)):
        held = layers[start:stop]
        has_matrices = any(layer.has_matrices for layer in held)
        has_vectors = any(layer.has_vectors for layer in held)
        if not (has_matrices and has_vectors):
            illegal.append(number)
    return illegal


def stage_costs(layers: Sequence[FlatLayer], bounds: Sequence[int]) -> list[int]:
    """Add up the operations of every stage, see ``FlatLayer.cost``."""
    return [sum(layer.cost for layer in layers[start:stop]) for start, stop in pairwise(bounds)]


def imbalance(costs: Sequence[float]) -> float:
    """Compute how much the most expensive stage is above the mean, as a share of the mean."""
    return max(costs) * len(costs) / sum(costs) - 1
