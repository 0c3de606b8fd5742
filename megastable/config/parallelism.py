"""How a run is laid out: pipeline stages with the parts of a block that they recompute, and tensor ranks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Annotated

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from megastable.config.limits import LONGEST_PATTERN, MOST_LAYERS, MOST_REPETITIONS, MOST_STAGES, MOST_TENSOR_RANKS
from megastable.config.reading.faults import Fault
from megastable.config.section import Section
from megastable.core.flops import BLOCK, HALVES, RECOMPUTED_KINDS
from megastable.core.partition import PARTITIONS, TYPE_PREFIX

EXCLUSIVE = [kind for kind in RECOMPUTED_KINDS if kind not in HALVES]
"""Kinds of recomputation that stand alone in a list; the halves of a block may stand together."""


def _kinds_fit_together(value: object) -> object:
    if isinstance(value, bool):
        return value
    if isinstance(value, list | tuple) and value and all(isinstance(kind, str) for kind in value):
        # Whole blocks include both halves, so that a list of a block and a half would say one thing twice.
        alone = len(value) == 1 and value[0] in EXCLUSIVE
        together = len(value) == len(set(value)) and set(value) <= set(HALVES)
        if alone or together:
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
"""The type of the key that says what is recomputed: true, false, or a list of kinds that fit together."""


def _must_be_a_quick_pattern(pattern: str) -> None:
    """Refuse what is no regular expression, and what may take Python's engine longer than anybody waits.

    It tries one way after the other to match, and groups within repetitions have exponentially many of them. Without
    groups, r repetitions on a name of n characters have about n^(r + 1).
    """
    # DeepSpeed searches the names of classes for it, only after every process has started.
    # Signs that are escaped or within a set of characters count as well: to tell them apart takes a parser.
    num_repetitions = sum(pattern.count(sign) for sign in "*+?{")
    if "(" in pattern or len(pattern) > LONGEST_PATTERN or num_repetitions > MOST_REPETITIONS:
        raise PydanticCustomError(
            "quick_pattern",
            "must have no groups, at most {repetitions} repetitions and {characters} characters after type:",
            {"repetitions": MOST_REPETITIONS, "characters": LONGEST_PATTERN},
        )
    try:
        re.compile(pattern)
    except (re.error, OverflowError) as error:  # OverflowError: a{99999999999}
        raise PydanticCustomError(
            "pattern", "has no regular expression after type: {error}", {"error": str(error)}
        ) from None


def _are_block_counts(values: Sequence[object]) -> bool:
    # type() and not isinstance(): to Python, JSON's true is a whole number.
    # A stage may have no block: the first and the last hold layers of their own besides.
    are_counts = all(type(blocks) is int and 0 <= blocks <= MOST_LAYERS for blocks in values)
    return are_counts and 0 < len(values) <= MOST_STAGES


def _method_or_block_counts(value: object) -> object:
    if isinstance(value, list | tuple) and _are_block_counts(value):
        return tuple(value)
    if isinstance(value, str) and value in PARTITIONS:
        return value
    if isinstance(value, str) and value.startswith(TYPE_PREFIX):
        _must_be_a_quick_pattern(value.removeprefix(TYPE_PREFIX))
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
        _method_or_block_counts,
        # What a JSON Schema can say of it: neither that a regular expression is one, nor that the counts fit the model.
        json_schema_input_type=Annotated[
            str, Field(pattern=f"^({'|'.join(PARTITIONS)}|{TYPE_PREFIX}[^(]{{0,{LONGEST_PATTERN}}})$")
        ]
        | Annotated[list[Annotated[int, Field(ge=0, le=MOST_LAYERS)]], Field(max_length=MOST_STAGES)],
    ),
]
"""The type of the key that says how the layers are cut: a method's name, or the number of blocks of every stage."""


class PipelineConfig(Section):
    """How the layers are spread over pipeline stages."""

    num_stages: int = Field(
        default=1,
        ge=1,
        le=MOST_STAGES,
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
        """List what is recomputed; true means whole blocks."""
        chosen = self.activation_checkpointing
        if chosen is True:
            return (BLOCK,)
        if chosen is False:
            return ()
        return chosen


class TensorParallelConfig(Section):
    """How every layer is split over neighbouring processes."""

    size: int = Field(
        default=1,
        ge=1,
        le=MOST_TENSOR_RANKS,
        description="Processes that share every layer, best within one node; "
        "the data-parallel size is world size / (num_stages x size).",
    )
    sequence_parallel: bool = Field(
        default=False,
        description="Split what lies between the layers along the sequence, which saves activation memory.",
    )


def sequence_parallel_needs_tensor_ranks(tensor_parallel: TensorParallelConfig) -> Iterator[Fault]:
    """Refuse sequence parallelism with one rank: there is nothing to split, and the key would be ignored."""
    if tensor_parallel.sequence_parallel and tensor_parallel.size == 1:
        yield Fault(
            "megastable.tensor_parallel.sequence_parallel", True, "needs megastable.tensor_parallel.size above 1"
        )
