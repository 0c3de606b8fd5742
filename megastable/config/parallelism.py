"""Which parts of a block are recomputed: true, false, or a list of kinds.

How a run is laid out: pipeline stages and tensor ranks.

How the model of a run file is cut into pipeline stages.

Rules of how the layers are cut into stages. A rule's parameters say, by their types, which sections it needs.

Rules of what tensor ranks have to divide. A rule's parameters say, by their types, which sections it needs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from megastable.config.model import ModelConfig
from megastable.config.reading.faults import Fault
from megastable.config.section import Section
from megastable.core.flops import BLOCK, HALVES, RECOMPUTED_KINDS, ModelShape, Recomputation
from megastable.core.model_parts import ModelParts, StageLayers
from megastable.core.partition import (
    PARTITIONS,
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

EXCLUSIVE = [kind for kind in RECOMPUTED_KINDS if kind not in HALVES]


def _kinds_fit_together(value: object) -> object:
    if isinstance(value, bool):
        return value
    if isinstance(value, list | tuple) and all(isinstance(kind, str) for kind in value):
        together = len(value) == len(set(value)) and set(value) <= set(HALVES)
        if value and (together or list(value) in [[kind] for kind in EXCLUSIVE]):
            return tuple(value)
    lists = " or ".join(json.dumps(kinds) for kinds in [*([kind] for kind in EXCLUSIVE), list(HALVES)])
    raise PydanticCustomError(
        "recomputed_kinds", "must be true, false or a list: {lists}, or one of the latter", {"lists": lists}
    )


_Kind = Annotated[str, Field(json_schema_extra={"enum": list(RECOMPUTED_KINDS)})]
RecomputedKinds = Annotated[
    bool | tuple[str, ...],
    BeforeValidator(_kinds_fit_together, json_schema_input_type=bool | Annotated[list[_Kind], Field(min_length=1)]),
]
"""The type of the key."""


def _partition(value: object) -> object:
    if isinstance(value, list | tuple) and value and all(type(blocks) is int and blocks >= 0 for blocks in value):
        return tuple(value)
    if isinstance(value, str) and value in PARTITIONS:
        return value
    if isinstance(value, str) and value.startswith(TYPE_PREFIX):
        try:
            re.compile(value.removeprefix(TYPE_PREFIX))
        except re.error as error:
            raise PydanticCustomError(
                "pattern", "has no regular expression after type: {error}", {"error": str(error)}
            ) from None
        return value
    names = ", ".join(json.dumps(name) for name in PARTITIONS)
    raise PydanticCustomError(
        "partition",
        'must be {names}, "type:regex" over class names, or the number of blocks of every stage',
        {"names": names},
    )


PartitionMethod = Annotated[
    str | tuple[int, ...],
    BeforeValidator(
        _partition,
        json_schema_input_type=Annotated[str, Field(pattern=f"^({'|'.join(PARTITIONS)}|{TYPE_PREFIX}.*)$")]
        | list[Annotated[int, Field(ge=0)]],
    ),
]


class PipelineConfig(Section):
    """How the layers are spread over pipeline stages."""

    num_stages: int = Field(
        default=1,
        ge=1,
        description="Pipeline stages; the data-parallel size is world size / (num_stages x tensor_parallel.size).",
    )
    activation_checkpointing: RecomputedKinds = Field(
        default=False,
        description='What of every block is recomputed in the backward pass instead of kept: true or ["block"] for all '
        'but its input, or a list of its halves, "attention" and "feed_forward".',
    )
    partition: PartitionMethod = Field(
        default="balanced",
        description="How the layers are cut into stages. balanced: by forward and backward cost; "
        "[5, 3]: so many blocks a stage; uniform, parameters, type:regex: as DeepSpeed cuts.",
    )

    @property
    def recomputed_kinds(self) -> tuple[str, ...]:
        """What is recomputed, as a list."""
        chosen = self.activation_checkpointing
        if isinstance(chosen, bool):
            return (BLOCK,) if chosen else ()
        return chosen


class TensorParallelConfig(Section):
    """How every layer is split over neighbouring processes."""

    size: int = Field(
        default=1,
        ge=1,
        description="Processes that share every layer, best within one node; "
        "the data-parallel size is world size / (num_stages x size).",
    )
    sequence_parallel: bool = Field(
        default=False,
        description="Split what lies between the layers along the sequence, which saves activation memory.",
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


def tensor_ranks_divide_the_model(model: ModelConfig, tensor_parallel: TensorParallelConfig) -> Iterator[Fault]:
    """Every split width falls into equal parts, one for each tensor rank."""
    size = tensor_parallel.size
    divided = {
        "num_attention_heads": (model.num_attention_heads, ""),
        "ffn_hidden_size": (model.ffn_size, ""),
        "vocab_size": (model.padded_vocab_size, " once padded; choose another vocab_padding_multiple"),
    }
    if tensor_parallel.sequence_parallel:
        divided["seq_length"] = (model.seq_length, " under sequence_parallel")
    for key, (value, note) in divided.items():
        if value % size:
            legal = f"must be a multiple of megastable.tensor_parallel.size ({size}){note}"
            yield Fault(f"megastable.model.{key}", value, legal)


def tensor_ranks_divide_kv_heads(model: ModelConfig, tensor_parallel: TensorParallelConfig) -> Iterator[Fault]:
    """A rank has whole key-value heads, or several ranks share one; then each projects a part of its features."""
    size, heads = tensor_parallel.size, model.kv_heads
    shared = size % heads == 0 and 2 * heads * model.head_dim % size == 0
    if heads % size and not shared:
        yield Fault(
            "megastable.model.num_key_value_heads",
            heads,
            f"must be a multiple or a divisor of megastable.tensor_parallel.size ({size})",
        )


def sequence_parallel_needs_tensor_ranks(tensor_parallel: TensorParallelConfig) -> Iterator[Fault]:
    """With one rank there is nothing to split, and the key would be ignored."""
    if tensor_parallel.sequence_parallel and tensor_parallel.size == 1:
        yield Fault(
            "megastable.tensor_parallel.sequence_parallel", True, "needs megastable.tensor_parallel.size above 1"
        )


def compiled_blocks_are_whole(model: ModelConfig, tensor_parallel: TensorParallelConfig) -> Iterator[Fault]:
    """torch.compile does not see through the collectives of split layers."""
    if model.compile and tensor_parallel.size > 1:
        yield Fault(
            "megastable.model.compile",
            True,
            f"must be false with megastable.tensor_parallel.size above 1 ({tensor_parallel.size})",
        )
