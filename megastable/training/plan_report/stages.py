"""What each pipeline stage holds and computes, from the plan of a run."""

from __future__ import annotations

from itertools import pairwise

from megastable.config import ModelConfig
from megastable.core.flops import ModelShape
from megastable.core.layout import ParallelLayout, stage_bounds
from megastable.core.parameters import ModelParts, StageLayers


def stages_of(num_layers: int, layout: ParallelLayout) -> list[StageLayers]:
    """The layers of every stage, as the engine cuts them."""
    bounds = stage_bounds(num_layers, layout.num_stages, layers_before=0, layers_after=0)
    return [
        StageLayers(stop - start, is_first=stage == 0, is_last=stage == layout.num_stages - 1)
        for stage, (start, stop) in enumerate(pairwise(bounds))
    ]


def model_parts(model: ModelConfig) -> ModelParts:
    """What the model is made of."""
    return ModelParts(
        tie_embeddings=model.tie_embeddings,
        learned_positions=model.position_embedding == "learned",
        embedding_norm=model.embedding_norm,
        norm_has_bias=model.norm == "layernorm",
    )


def forward_flops_per_sample(shape: ModelShape, stage: StageLayers) -> int:
    """Operations of a stage's forward pass over one sample, all tensor ranks together; a lookup has none."""
    return stage.num_blocks * shape.block_forward_flops + (shape.head_forward_flops if stage.is_last else 0)
