"""How the model of a run file is cut into pipeline stages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from megastable.config.model import ModelConfig
from megastable.config.parallelism import PipelineConfig, TensorParallelConfig
from megastable.config.reading.faults import Fault
from megastable.core.flops import ModelShape, Recomputation
from megastable.core.model_parts import ModelParts, StageLayers
from megastable.core.partition import (
    TYPE_PREFIX,
    FlatLayer,
    describe_stage,
    flat_layers,
    illegal_stages,
    imbalance,
    matches_type,
    stage_bounds,
    stage_costs,
)


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


PARTITION = "megastable.pipeline.partition"


def no_more_stages_than_layers(model: ModelConfig, pipeline: PipelineConfig) -> Iterator[Fault]:
    """Every stage has a block, or it is the last and has final norm and head."""
    if pipeline.num_stages > model.num_layers + 1:
        yield Fault(
            "megastable.pipeline.num_stages",
            pipeline.num_stages,
            f"must be at most megastable.model.num_layers ({model.num_layers}) + 1: every stage needs a layer with "
            "weights of its own",
        )


def block_counts_make_the_model(model: ModelConfig, pipeline: PipelineConfig) -> Iterator[Fault]:
    """A list has a number of blocks for every stage, and they are the model's."""
    counts, stages, blocks = pipeline.partition, pipeline.num_stages, model.num_layers
    if isinstance(counts, tuple) and (len(counts) != stages or sum(counts) != blocks):
        yield Fault(
            PARTITION,
            counts,
            f"must have one entry a stage (megastable.pipeline.num_stages is {stages}, entries are {len(counts)}) that "
            f"sum to megastable.model.num_layers ({blocks}; the entries sum to {sum(counts)})",
        )


def type_matches_a_class(model: ModelConfig, pipeline: PipelineConfig) -> Iterator[Fault]:
    """A type that is no layer's would leave all layers on one stage."""
    method = pipeline.partition
    if not isinstance(method, str) or not method.startswith(TYPE_PREFIX):
        return
    layers = flat_layers(model_shape(model), model_parts(model), Recomputation())
    names = list(dict.fromkeys(layer.class_name for layer in layers))
    if not any(matches_type(name, method.removeprefix(TYPE_PREFIX)) for name in names):
        yield Fault(PARTITION, method, f"matches no class of a layer; there are {', '.join(names)}")


def every_stage_has_weights(
    model: ModelConfig, pipeline: PipelineConfig, tensor_parallel: TensorParallelConfig
) -> Iterator[Fault]:
    """The optimizer needs matrices and vectors on every stage, see ``core.partition.illegal_stages``."""
    cut = StageCut.of(model, pipeline, tensor_parallel)
    for stage in illegal_stages(cut.layers, cut.bounds):
        yield Fault(
            PARTITION,
            pipeline.partition,
            f"leaves stage {stage} of {pipeline.num_stages} with {cut.descriptions[stage] or 'no layer'}; every stage "
            "needs a block, or weight matrices and a norm of its own: take balanced, or fewer stages",
        )
