"""Floating-point operations of one training step, by the exact matrix products of the configured model.

A product of (m x k) by (k x n) counts 2mkn. *Model* FLOPs are what the algorithm needs (forward once, backward twice
that); *hardware* FLOPs add what is computed again (``core.recomputation``) and what the padded vocabulary costs.
The attention matrix counts in full, as in Narayanan et al., arXiv 2104.04473, equation 3 (causality is not credited).

What a backward pass computes again in place of keeping it, and what that costs in operations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

BACKWARD_FORWARD_RATIO = 2  # each forward product has two gradients: of its input and of its weight


@dataclass(frozen=True)
class ModelShape:
    """The sizes that decide the operation count. Unlike parameters they do not depend on tying or positions."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    ffn_hidden_size: int
    gated_ffn: bool
    seq_length: int
    vocab_size: int
    padded_vocab_size: int

    @property
    def attention_forward_flops(self) -> int:
        """The attention of one transformer block, forward, per sample (``seq_length`` tokens)."""
        key_value_size = self.hidden_size // self.num_attention_heads * self.num_key_value_heads
        weights = self.hidden_size * (2 * self.hidden_size + 2 * key_value_size)
        matrix = 2 * self.seq_length * self.hidden_size  # Q times K, and the weights times V
        return 2 * self.seq_length * (weights + matrix)

    @property
    def feed_forward_flops(self) -> int:
        """The feed-forward layer of one transformer block, forward, per sample."""
        return 2 * self.seq_length * self.hidden_size * self.ffn_hidden_size * (3 if self.gated_ffn else 2)

    @property
    def block_forward_flops(self) -> int:
        """One transformer block, forward, per sample."""
        return self.attention_forward_flops + self.feed_forward_flops

    @property
    def head_forward_flops(self) -> int:
        """The head over the padded vocabulary, forward, per sample."""
        return 2 * self.seq_length * self.hidden_size * self.padded_vocab_size

    @property
    def model_flops_per_sample(self) -> int:
        """Forward and backward of one sample: what the algorithm needs."""
        head = 2 * self.seq_length * self.hidden_size * self.vocab_size
        return (1 + BACKWARD_FORWARD_RATIO) * (self.num_layers * self.block_forward_flops + head)

    def hardware_flops_per_sample(self, recomputed_flops: int) -> int:
        """Forward and backward of one sample as executed, with so many operations done again (``Recomputation``)."""
        forward = self.num_layers * self.block_forward_flops + self.head_forward_flops
        return (1 + BACKWARD_FORWARD_RATIO) * forward + recomputed_flops


def tflops_per_device(flops_per_sample: int, global_batch_size: int, step_seconds: float, num_devices: int) -> float:
    """Trillion operations a second and device, of a step of ``global_batch_size`` samples."""
    return flops_per_sample * global_batch_size / step_seconds / num_devices / 1e12


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
