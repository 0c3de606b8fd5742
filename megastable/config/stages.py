"""How the model of a run file is cut into pipeline stages."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from megastable.config.model import ModelConfig
from megastable.config.sections import PipelineConfig, TensorParallelConfig
from megastable.core.flops import ModelShape
from megastable.core.parameters import ModelParts, StageLayers
from megastable.core.partition import FlatLayer, describe_stage, flat_layers, imbalance, stage_bounds, stage_costs
from megastable.core.recomputation import Recomputation


@dataclass(frozen=True)
class StageCut:
    """The flat list of layers, and the bounds of the stages in it."""

    layers: tuple[FlatLayer, ...]
    bounds: tuple[int, ...]

    @classmethod
    def of(cls, model: ModelConfig, pipeline: PipelineConfig, tensor_parallel: TensorParallelConfig) -> StageCut:
        """As a valid run file asks for it; see ``core.partition.stage_bounds``.

        That a loss in chunks computes the head's product again is left out: to switch it must not move a cut.
        """
        recomputed = Recomputation(pipeline.recomputed_kinds)
        layers = flat_layers(model_shape(model), model_parts(model), recomputed, tensor_parallel.size)
        return cls(layers, stage_bounds(layers, pipeline.num_stages, pipeline.partition))

    @property
    def stages(self) -> list[StageLayers]:
        """What every stage holds, from the first to the last."""
        return [StageLayers.of([layer.name for layer in own]) for own in self._held]

    @property
    def descriptions(self) -> list[str]:
        """The same for people."""
        return [describe_stage(own) for own in self._held]

    @property
    def imbalance(self) -> float:
        """Predicted from the operations: the dearest stage over the mean, minus 1."""
        return imbalance(stage_costs(self.layers, self.bounds))

    def __str__(self) -> str:
        return f"{' | '.join(self.descriptions)}; predicted imbalance {self.imbalance:.1%}"

    @property
    def _held(self) -> list[tuple[FlatLayer, ...]]:
        return [self.layers[start:stop] for start, stop in pairwise(self.bounds)]


def model_shape(model: ModelConfig) -> ModelShape:
    """The sizes that decide the operation count."""
    return ModelShape(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.kv_heads,
        ffn_hidden_size=model.ffn_size,
        gated_ffn=model.activation == "swiglu",
        seq_length=model.seq_length,
        vocab_size=model.vocab_size,
        padded_vocab_size=model.padded_vocab_size,
    )


def model_parts(model: ModelConfig) -> ModelParts:
    """What the model is made of."""
    return ModelParts(
        tie_embeddings=model.tie_embeddings,
        learned_positions=model.position_embedding == "learned",
        embedding_norm=model.embedding_norm,
        norm_has_bias=model.norm == "layernorm",
        qk_norm=model.qk_norm,
    )
