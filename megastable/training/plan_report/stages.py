"""What each pipeline stage computes, from the plan of a run."""

from __future__ import annotations

from megastable.core.flops import ModelShape
from megastable.core.parameters import StageLayers


def forward_flops_per_sample(shape: ModelShape, stage: StageLayers) -> int:
    """Operations of a stage's forward pass over one sample, all tensor ranks together; a lookup has none."""
    head = 2 * shape.seq_length * shape.hidden_size * shape.padded_vocab_size if stage.is_last else 0
    return stage.num_blocks * shape.block_forward_flops + head


def recomputed_flops_per_sample(shape: ModelShape, stage: StageLayers) -> int:
    """Operations that activation checkpointing adds to a stage's backward pass: its blocks once more."""
    return stage.num_blocks * shape.block_forward_flops
