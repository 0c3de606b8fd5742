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
from typing import Annotated

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from megastable.config.model import ModelConfig
from megastable.config.reading.faults import Fault
from megastable.config.section import Section
from megastable.core.flops import BLOCK, HALVES, RECOMPUTED_KINDS
from megastable.core.partition import (
    PARTITIONS,
    TYPE_PREFIX,
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
