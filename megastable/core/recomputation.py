"""What a backward pass computes again in place of keeping it, and what that costs in operations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megastable.core.flops import ModelShape

BLOCK = "block"
ATTENTION = "attention"
FEED_FORWARD = "feed_forward"

RECOMPUTED_KINDS: dict[str, Callable[[ModelShape], int]] = {
    BLOCK: lambda shape: shape.block_forward_flops,
    ATTENTION: lambda shape: shape.attention_forward_flops,
    FEED_FORWARD: lambda shape: shape.feed_forward_flops,
}
"""Kind of activation checkpointing -> operations that it adds to each block and sample.

A half block is its norm and its layer; what lies between the halves is kept. Both halves together recompute the
products of the whole block, one half at a time.
"""
HALVES = (ATTENTION, FEED_FORWARD)
"""What may stand together in a list."""


@dataclass(frozen=True)
class Recomputation:
    """What a run computes again.

    Attributes:
        kinds: of ``RECOMPUTED_KINDS``; the block alone, or halves of it.
        head: the head's product, for a loss in chunks.
    """

    kinds: tuple[str, ...] = ()
    head: bool = False

    @property
    def whole_blocks(self) -> bool:
        """Only the input of every block is kept."""
        return BLOCK in self.kinds

    @property
    def num_halves(self) -> int:
        """Half blocks that are computed again, in each block."""
        return len(HALVES) if self.whole_blocks else len(self.kinds)

    def flops_per_sample(self, shape: ModelShape, num_blocks: int, holds_head: bool) -> int:
        """Operations on one sample that so many blocks, and the head where it is, add to a backward pass."""
        again = num_blocks * sum(RECOMPUTED_KINDS[kind](shape) for kind in self.kinds)
        return again + (shape.head_forward_flops if self.head and holds_head else 0)
