"""Cutting a list of numbers into consecutive parts: the exact problem, and DeepSpeed's two answers to it.

Where the flat list of layers is cut into pipeline stages.

A cut is given by its bounds: ``num_stages + 1`` indices into the list; stage i holds ``[bounds[i], bounds[i + 1])``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

from megastable.core.flops import BACKWARD_FORWARD_RATIO, ModelShape, Recomputation
from megastable.core.model_parts import ModelParts, StageLayers, stage_parameters


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


LAYERS_AT_EACH_END = 2
"""Lookup and embedding finish before the blocks, final norm and head after them."""
FIRST_CUT = LAYERS_AT_EACH_END + 1
"""Behind the first block."""
SMALL_OPERATIONS = 10
"""Counted for each element of what is no matrix product (lookup, positions, norms, loss): a rough figure, small beside
the 2 x hidden operations that a product spends on each."""
TYPE_PREFIX = "type:"

Partition = str | tuple[int, ...]
"""A name of ``PARTITIONS``, ``type:regex``, or the number of blocks of every stage."""


@dataclass(frozen=True)
class FlatLayer:
    """One layer of the model, by name and size; ``model.layers.gpt_layers`` builds the same list in torch."""

    name: str
    class_name: str
    num_parameters: int
    """On one tensor rank; a tied head counts, as DeepSpeed counts it."""
    has_matrices: bool
    has_vectors: bool
    """Norms and biases."""
    cost: int
    """Operations of a sample, forward and backward, over all tensor ranks."""


def flat_layers(
    shape: ModelShape, parts: ModelParts, recomputation: Recomputation, tensor_parallel_size: int = 1
) -> tuple[FlatLayer, ...]:
    """The model's layers in order: embedding, embedding finish, blocks, final norm, head.

    The backward pass counts twice the forward pass, and what is computed again once more. The head multiplies by the
    padded vocabulary.
    """
    width, logits = shape.seq_length * shape.hidden_size, shape.seq_length * shape.padded_vocab_size
    finish = SMALL_OPERATIONS * width * (parts.learned_positions + parts.embedding_norm)
    passes = 1 + BACKWARD_FORWARD_RATIO

    def layer(name: str, class_name: str, cost: int, matrices: bool, vectors: bool) -> FlatLayer:
        held = stage_parameters(shape, parts, StageLayers.of([name]), tensor_parallel_size)
        return FlatLayer(name, class_name, held, matrices, vectors, cost)

    block = passes * shape.block_forward_flops + recomputation.flops_per_sample(shape, 1, holds_head=False)
    head = (2 * shape.hidden_size + SMALL_OPERATIONS) * logits * passes
    head += recomputation.flops_per_sample(shape, 0, holds_head=True)
    return (
        layer("embedding", "VocabularyEmbedding", SMALL_OPERATIONS * width * passes, True, False),
        layer("embedding_finish", "EmbeddingFinish", finish * passes, parts.learned_positions, parts.embedding_norm),
        *(layer(f"block_{number}", "TransformerBlock", block, True, True) for number in range(shape.num_layers)),
        layer("final_norm", "FinalNorm", SMALL_OPERATIONS * width * passes, False, True),
        layer("head", "VocabularyEmbedding" if parts.tie_embeddings else "OutputHead", head, True, False),
    )


def balanced(layers: Sequence[FlatLayer], num_stages: int) -> tuple[int, ...]:
    """The dearest stage is as cheap as it can be, then the stages as equal as they can be.

    Cuts fall behind a block: the embedding, which costs next to nothing, stays with the first one, and the final norm
    with the head, which may have a stage of their own.

    Raises:
        ValueError: more stages than blocks and head.
    """
    costs = [layer.cost for layer in layers]
    items = (sum(costs[:FIRST_CUT]), *costs[FIRST_CUT:-LAYERS_AT_EACH_END], sum(costs[-LAYERS_AT_EACH_END:]))
    bounds = _least_largest_sum(items, num_stages)
    return (0, *(bound + FIRST_CUT - 1 for bound in bounds[1:-1]), len(layers))


def uniform(layers: Sequence[FlatLayer], num_stages: int) -> tuple[int, ...]:
    """As many layers in every stage, whatever they cost: DeepSpeed's ``uniform``."""
    return deepspeed_uniform(len(layers), num_stages)


def by_parameters(layers: Sequence[FlatLayer], num_stages: int) -> tuple[int, ...]:
    """As many weights in every stage: DeepSpeed's ``parameters``."""
    return _deepspeed_balanced(tuple(layer.num_parameters for layer in layers), num_stages)


PARTITIONS: dict[str, Callable[[Sequence[FlatLayer], int], tuple[int, ...]]] = {
    "balanced": balanced,
    "uniform": uniform,
    "parameters": by_parameters,
}
"""To add a method: a function from the layers and the number of stages to the bounds, and a line here."""


def stage_bounds(layers: Sequence[FlatLayer], num_stages: int, partition: Partition) -> tuple[int, ...]:
    """The bounds of a cut. Those that are not ``balanced`` may leave ``illegal_stages``.

    Raises:
        KeyError: no such method.
        ValueError: ``balanced`` with more stages than blocks and head.
        re.error: ``type:`` with what is no regular expression.
    """
    if not isinstance(partition, str):
        return _of_block_counts(partition, len(layers))
    if partition.startswith(TYPE_PREFIX):
        pattern = partition.removeprefix(TYPE_PREFIX)
        weights = tuple(int(matches_type(layer.class_name, pattern)) for layer in layers)
        return _deepspeed_balanced(weights, num_stages)
    return PARTITIONS[partition](layers, num_stages)


def matches_type(class_name: str, pattern: str) -> bool:
    """Whether a class is one that ``type:pattern`` counts: anywhere in the name, in whatever case."""
    return re.search(pattern, class_name, re.IGNORECASE) is not None


def illegal_stages(layers: Sequence[FlatLayer], bounds: Sequence[int]) -> list[int]:
    """The stages that lack matrices or vectors, which are the two groups of the optimizer.

    DeepSpeed drops the empty group, so that stages have unlike optimizers: some such cuts were seen to hang, others to
    train, depending on the number format. A stage with vectors has weights of its own: only matrices are tied.
    """
    stages = [layers[start:stop] for start, stop in pairwise(bounds)]
    return [
        number
        for number, own in enumerate(stages)
        if not (any(layer.has_matrices for layer in own) and any(layer.has_vectors for layer in own))
    ]


def stage_costs(layers: Sequence[FlatLayer], bounds: Sequence[int]) -> list[int]:
    """Operations of every stage, see ``FlatLayer.cost``."""
    return [sum(layer.cost for layer in layers[start:stop]) for start, stop in pairwise(bounds)]


def imbalance(costs: Sequence[float]) -> float:
    """The dearest stage over the mean, minus 1."""
    return max(costs) * len(costs) / sum(costs) - 1


def describe_stage(layers: Sequence[FlatLayer]) -> str:
    """What a stage holds, for people: ``embedding + 3 blocks``. A norm or finish goes without saying beside its end."""
    names = [layer.name for layer in layers]
    blocks = sum(name.startswith("block_") for name in names)
    shown = [f"{blocks} block{'s' if blocks > 1 else ''}"] if blocks else []
    if "embedding" in names:
        shown.insert(0, "embedding")
    elif "embedding_finish" in names:
        shown.insert(0, "embedding finish")
    if "head" in names:
        shown.append("head" if "final_norm" in names else "head without its norm")
    elif "final_norm" in names:
        shown.append("final norm")
    return " + ".join(shown)


def _of_block_counts(counts: Sequence[int], num_layers: int) -> tuple[int, ...]:
    ends = [LAYERS_AT_EACH_END + blocks for blocks in accumulate(counts)]
    return (0, *ends[:-1], num_layers)


# A search over layouts, and every rule of a run file, asks for the same cuts again.
_least_largest_sum = lru_cache(maxsize=512)(least_largest_sum)
_deepspeed_balanced = lru_cache(maxsize=512)(deepspeed_balanced)
