"""Floating-point operations of one training step, by the exact matrix products of the configured model.

A product of (m x k) by (k x n) counts 2mkn. *Model* FLOPs are what the algorithm needs: a forward pass, and a backward
pass of twice that. *Hardware* FLOPs add what is computed again in the backward pass in place of being kept
(``Recomputation``), and what the padding of the vocabulary costs. The attention matrix counts in full, as in Narayanan
et al., arXiv 2104.04473, equation 3: that half of it is masked is not credited.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megastable.core.model_parts import FeedForwardKind

BACKWARD_FORWARD_RATIO = 2
"""Each product of the forward pass has two gradients, of its input and of its weight, each as expensive as itself."""


@dataclass(frozen=True)
class ModelShape:
    """The sizes that decide how many operations a model takes, which neither ties nor positions change."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    feed_forward: FeedForwardKind
    ffn_hidden_size: int
    seq_length: int
    vocab_size: int
    padded_vocab_size: int

    @property
    def head_dim(self) -> int:
        """Return the width of one attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def key_value_size(self) -> int:
        """Return the width of all keys of a token, which is that of its values."""
        return self.head_dim * self.num_key_value_heads

    @property
    def ffn_input_size(self) -> int:
        """Return the width of all projections into a feed-forward layer, a gate included."""
        return self.ffn_hidden_size * self.feed_forward.input_projections

    @property
    def kept_ffn_size(self) -> int:
        """Count the elements that a feed-forward layer keeps of a token for its backward pass."""
        return self.ffn_hidden_size * self.feed_forward.kept_per_width

    @property
    def attention_forward_flops(self) -> int:
        """Count the operations of the attention of one block, forward, on one sample (``seq_length`` tokens)."""
        weights = self.hidden_size * (2 * self.hidden_size + 2 * self.key_value_size)  # Q and output, K and V
        matrix = 2 * self.seq_length * self.hidden_size  # Q times K, and the attention weights times V
        return 2 * self.seq_length * (weights + matrix)

    @property
    def feed_forward_flops(self) -> int:
        """Count the operations of the feed-forward layer of one block, forward, on one sample."""
        return 2 * self.seq_length * self.hidden_size * (self.ffn_input_size + self.ffn_hidden_size)

    @property
    def block_forward_flops(self) -> int:
        """Count the operations of one transformer block, forward, on one sample."""
        return self.attention_forward_flops + self.feed_forward_flops

    @property
    def head_forward_flops(self) -> int:
        """Count the operations of the head over the padded vocabulary, forward, on one sample."""
        return 2 * self.seq_length * self.hidden_size * self.padded_vocab_size

    @property
    def model_flops_per_sample(self) -> int:
        """Count the operations that the algorithm needs, forward and backward, for one sample."""
        head = 2 * self.seq_length * self.hidden_size * self.vocab_size
        return (1 + BACKWARD_FORWARD_RATIO) * (self.num_layers * self.block_forward_flops + head)

    def hardware_flops_per_sample(self, recomputed_flops: int) -> int:
        """Return the operations that are executed for one sample, ``recomputed_flops`` of them a second time."""
        forward = self.num_layers * self.block_forward_flops + self.head_forward_flops
        return (1 + BACKWARD_FORWARD_RATIO) * forward + recomputed_flops


def tflops_per_device(flops_per_sample: int, global_batch_size: int, step_seconds: float, num_devices: int) -> float:
    """Return the trillion operations a second and device of a step of ``global_batch_size`` samples."""
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
"""The kinds that a run file may list together; the block alone covers both."""


@dataclass(frozen=True)
class Recomputation:
    """What the backward passes of a run compute again.

    Attributes:
        kinds: names of ``RECOMPUTED_KINDS``; the block alone, or halves of it.
        head: the head's product is computed again, as a loss in chunks does.
    """

    kinds: tuple[str, ...] = ()
    head: bool = False

    @property
    def whole_blocks(self) -> bool:
        """Tell whether only the input of every block is kept."""
        return BLOCK in self.kinds

    @property
    def num_halves(self) -> int:
        """Count the half blocks that are computed again in each block."""
        if self.whole_blocks:
            return len(HALVES)
        return len(self.kinds)

    def flops_per_sample(self, shape: ModelShape, num_blocks: int, holds_head: bool) -> int:
        """Return the operations that a backward pass over one sample adds on a stage of ``num_blocks`` blocks."""
        again = num_blocks * sum(RECOMPUTED_KINDS[kind](shape) for kind in self.kinds)
        if self.head and holds_head:
            again += shape.head_forward_flops
        return again
