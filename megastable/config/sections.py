"""The smaller sections of a run file."""

from __future__ import annotations

import json
import re
from typing import Annotated

from pydantic import BeforeValidator, Field, field_validator
from pydantic_core import PydanticCustomError

from megastable.config.recomputed_kinds import RecomputedKinds
from megastable.config.registered_name import must_be_registered
from megastable.config.section import Section
from megastable.core.init_std import INIT_SCHEMES
from megastable.core.partition import PARTITIONS, TYPE_PREFIX
from megastable.core.recomputation import BLOCK

LARGEST_SEED = 2**32 - 1
"""NumPy's generators take no larger one."""


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


class InitConfig(Section):
    """Standard deviation of fresh weights."""

    scheme: str = Field(
        default="megatron_530b",
        json_schema_extra={"enum": list(INIT_SCHEMES)},
        description="megatron_530b: sqrt(1/(3 hidden_size)); transformers_without_tears: sqrt(2/(5 hidden_size)); "
        "xavier: sqrt(2/(fan_in + fan_out)) of each matrix; fixed: std.",
    )
    std: float | None = Field(
        default=None, gt=0, description="Standard deviation; needed by, and only legal with, the scheme fixed."
    )
    residual_scaling: bool = Field(
        default=True,
        description="Divide the std of projections that write into the residual stream by sqrt(2 num_layers).",
    )
    embedding_std: float | None = Field(
        default=None,
        gt=0,
        description="Standard deviation of the token embedding (and a tied head); null: the scheme's.",
    )
    head_std: float | None = Field(
        default=None, gt=0, description="Standard deviation of an untied head; null: the scheme's."
    )

    @field_validator("scheme")
    @classmethod
    def _registered(cls, name: str) -> str:
        return must_be_registered(name, INIT_SCHEMES)


class TrainingConfig(Section):
    """How long to train, and how to evaluate."""

    total_samples: int | None = Field(default=None, ge=1, description="Samples of the whole run; or give total_steps.")
    total_steps: int | None = Field(
        default=None, ge=1, description="Optimizer steps of the whole run; or give total_samples."
    )
    seed: int = Field(
        default=1234, ge=0, le=LARGEST_SEED, description="Seed of the weights, the dropout and the data order."
    )
    eval_interval: int = Field(default=0, ge=0, description="Steps between two evaluations; 0 means never.")
    eval_samples: int = Field(default=256, ge=1, description="Most validation samples of one evaluation.")
    world_size: int | None = Field(
        default=None,
        ge=1,
        description="Processes that this file is meant for; a launch with another number is refused.",
    )
    z_loss: float = Field(
        default=0.0,
        ge=0,
        description="Weight of the squared log of the softmax's normaliser in the gradient; 1e-4 is customary.",
    )
    loss_chunk_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Logits and loss of so many tokens of a micro-batch at a time, computed again in the backward "
        "pass: saves memory where the vocabulary is large, for one more product with the head. null: all at once.",
    )
    fp16_on_cpu: bool = Field(
        default=False, description="Allow fp16 on a CPU, where its arithmetic is slow: for trying things out."
    )


class MonitorsConfig(Section):
    """What is watched while a run goes on, and how often."""

    interval: int = Field(
        default=10,
        ge=0,
        description="Steps between two looks at every layer (norms, updates, maxima); 0 means only after a skip.",
    )
    consistency_interval: int = Field(
        default=100,
        ge=0,
        description="Steps between two checks that weights which should be equal on several ranks are; 0 means never.",
    )
    headroom_warning: float = Field(
        default=0.25,
        gt=0,
        le=1,
        description="Share of the number format's maximum from which an activation or attention logit is warned of.",
    )
    max_skips_at_min_scale: int = Field(
        default=10,
        ge=1,
        description="Skips in a row at a loss scale that cannot fall (or without one) that stop the run.",
    )


class CheckpointConfig(Section):
    """When to save."""

    save_interval: int = Field(default=0, ge=0, description="Steps between two checkpoints; 0 means never.")


class LoggingConfig(Section):
    """What is printed."""

    interval: int = Field(default=10, ge=1, description="Steps between two printed lines.")
