"""How the model of a run file is cut into pipeline stages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from megastable.config.model import ModelConfig
from megastable.config.parallelism import PipelineConfig, TensorParallelConfig
from megastable.config.reading.faults import Fault
from megastable.core.flops import ModelShape, Recomputation
from megastable.core.layers import FlatLayer, StageLayers, describe_stage, flat_layers
from megastable.core.model_parts import (
    FEED_FORWARD_KINDS,
    NORM_KINDS,
    POSITION_KINDS,
    ModelParts,
    executed_attention,
)
from megastable.core.partition import (
    LAYERS_AT_EACH_END,
    TYPE_PREFIX,
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
        """Cut as a valid run file asks for it; see ``core.partition.stage_bounds``.

        That a loss in chunks computes the head's product again is left out: to switch it must not move a cut.
        """
        recomputed = Recomputation(pipeline.recomputed_kinds)
        layers = flat_layers(model_shape(model), model_parts(model), recomputed, tensor_parallel.size)
        return cls(layers, stage_bounds(layers, pipeline.num_stages, pipeline.partition))

    @cached_property
    def stages(self) -> list[StageLayers]:
        """Count what every stage holds, from the first to the last."""
        return [StageLayers.of(layer.kind for layer in own) for own in self._held]

    @property
    def descriptions(self) -> list[str]:
        """Tell people what every stage holds."""
        return [describe_stage(own) for own in self._held]

    @property
    def imbalance(self) -> float:
        """Predict from the operations how much the most expensive stage is above the mean, as a share of it."""
        return imbalance(stage_costs(self.layers, self.bounds))

    def __str__(self) -> str:
        return f"{' | '.join(self.descriptions)}; predicted imbalance {self.imbalance:.1%}"

    @property
    def _held(self) -> list[tuple[FlatLayer, ...]]:
        return [self.layers[start:stop] for start, stop in pairwise(self.bounds)]


def model_shape(model: ModelConfig) -> ModelShape:
    """Return the sizes that decide the operation count."""
    return ModelShape(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.kv_heads,
        feed_forward=FEED_FORWARD_KINDS[model.activation],
        ffn_hidden_size=model.ffn_size,
        seq_length=model.seq_length,
        vocab_size=model.vocab_size,
        padded_vocab_size=model.padded_vocab_size,
    )


def model_parts(model: ModelConfig) -> ModelParts:
    """Return the parts of which the model is made."""
    return ModelParts(
        positions=POSITION_KINDS[model.position_embedding],
        norm=NORM_KINDS[model.norm],
        attention=executed_attention(model.attention, model.attention_logit_cap),
        tie_embeddings=model.tie_embeddings,
        embedding_norm=model.embedding_norm,
        qk_norm=model.qk_norm,
        linear_biases=model.linear_biases,
        parallel_residual=model.parallel_residual,
    )


PARTITION = "megastable.pipeline.partition"
MOST_SUMS_OF_A_SEARCH = 5_000_000
"""About a second of Python."""


def no_more_stages_than_layers(model: ModelConfig, pipeline: PipelineConfig) -> Iterator[Fault]:
    """Refuse stages for which there is neither a block nor, on the last of them, the final norm."""
    if pipeline.num_stages > model.num_layers + 1:
        yield Fault(
            "megastable.pipeline.num_stages",
            pipeline.num_stages,
            f"must be at most megastable.model.num_layers ({model.num_layers}) + 1: every stage needs a layer with "
            "weights of its own",
        )


def block_counts_make_the_model(model: ModelConfig, pipeline: PipelineConfig) -> Iterator[Fault]:
    """Refuse a list that has not one number for every stage, or whose numbers are not the model's blocks."""
    counts = pipeline.partition
    stages = pipeline.num_stages
    blocks = model.num_layers
    if isinstance(counts, tuple) and (len(counts) != stages or sum(counts) != blocks):
        yield Fault(
            PARTITION,
            counts,
            f"must have one entry a stage (megastable.pipeline.num_stages is {stages}, entries are {len(counts)}) that "
            f"sum to megastable.model.num_layers ({blocks}; the entries sum to {sum(counts)})",
        )


def type_matches_a_class(model: ModelConfig, pipeline: PipelineConfig) -> Iterator[Fault]:
    """Refuse a type that is no layer's, which would leave all layers on one stage."""
    method = pipeline.partition
    if not isinstance(method, str) or not method.startswith(TYPE_PREFIX):
        return
    layers = flat_layers(model_shape(model), model_parts(model), Recomputation())
    names = list(dict.fromkeys(layer.class_name for layer in layers))
    if not any(matches_type(name, method.removeprefix(TYPE_PREFIX)) for name in names):
        yield Fault(PARTITION, method, f"matches no class of a layer; there are {', '.join(names)}")


def deepspeed_finds_the_cut(model: ModelConfig, pipeline: PipelineConfig) -> Iterator[Fault]:
    """Refuse a model so deep on so many stages that DeepSpeed's own search for the cut would not end soon.

    It tries every start of every part of every prefix, in Python and in every process: stages x layers^2 sums.
    """
    method = pipeline.partition
    # A list and "uniform" need no search, and "balanced" has one of its own, which is quick.
    searched = isinstance(method, str) and (method == "parameters" or method.startswith(TYPE_PREFIX))
    num_layers = model.num_layers + 2 * LAYERS_AT_EACH_END
    if searched and pipeline.num_stages * num_layers**2 > MOST_SUMS_OF_A_SEARCH:
        yield Fault(
            PARTITION,
            method,
            f"takes DeepSpeed about {pipeline.num_stages * num_layers**2:.1g} sums in every process, and at most "
            f"{MOST_SUMS_OF_A_SEARCH:.0g} are allowed; take balanced, uniform or a list of blocks",
        )


def every_stage_has_weights(
    model: ModelConfig, pipeline: PipelineConfig, tensor_parallel: TensorParallelConfig
) -> Iterator[Fault]:
    """Refuse a cut with a stage that lacks matrices or vectors, see ``core.partition.illegal_stages``."""
    cut = StageCut.of(model, pipeline, tensor_parallel)
    for stage in illegal_stages(cut.layers, cut.bounds):
        yield Fault(
            PARTITION,
            pipeline.partition,
            f"leaves stage {stage} of {pipeline.num_stages} with {cut.descriptions[stage] or 'no layer'}; every stage "
            "needs a block, or weight matrices and a norm of its own: take balanced, or fewer stages",
        )
