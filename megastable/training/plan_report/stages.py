"""What each pipeline stage computes, from the plan of a run."""

from __future__ import annotations

from megastable.core.flops import ModelShape
from megastable.core.parameters import StageLayers


def forward_flops_per_sample(shape: ModelShape, stage: StageLayers) -> int:
    """Operations of a stage's forward pass over one sample, all tensor ranks together; a lookup has none."""
    return stage.num_blocks * shape.block_forward_flops + (shape.head_forward_flops if stage.is_last else 0)
