"""Rules of how the layers are cut into stages. A rule's parameters say, by their types, which sections it needs."""

from __future__ import annotations

from collections.abc import Iterator

from megastable.config.faults import Fault
from megastable.config.model import ModelConfig
from megastable.config.sections import PipelineConfig, TensorParallelConfig
from megastable.config.stages import StageCut, model_parts, model_shape
from megastable.core.partition import TYPE_PREFIX, flat_layers, illegal_stages, matches_type
from megastable.core.recomputation import Recomputation

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
    broken = (
        *no_more_stages_than_layers(model, pipeline),
        *block_counts_make_the_model(model, pipeline),
        *type_matches_a_class(model, pipeline),
    )
    if broken:
        return
    cut = StageCut.of(model, pipeline, tensor_parallel)
    for stage in illegal_stages(cut.layers, cut.bounds):
        yield Fault(
            PARTITION,
            pipeline.partition,
            f"leaves stage {stage} of {pipeline.num_stages} with {cut.descriptions[stage] or 'no layer'}; every stage "
            "needs a block, or weight matrices and a norm of its own: take balanced, or fewer stages",
        )
