"""Floating-point operations of one training step, by the exact matrix products of the configured model.

A product of (m x k) by (k x n) counts 2mkn. *Model* FLOPs are what the algorithm needs (forward once, backward twice
that); *hardware* FLOPs add what is computed again (``core.recomputation``) and what the padded vocabulary costs.
The attention matrix counts in full, as in Narayanan et al., arXiv 2104.04473, equation 3 (causality is not credited).
"""

from __future__ import annotations

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
