"""A whole run file as one frozen object, as plain values again, and what differs between two of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from megastable.config.batch_rampup import BatchRampupConfig
from megastable.config.data import DataConfig
from megastable.config.deepspeed_keys import (
    Bf16Config,
    CometConfig,
    CsvMonitorConfig,
    DataTypesConfig,
    Dtype,
    Fp16Config,
    OptimizerConfig,
    TensorboardConfig,
    WandbConfig,
    ZeroConfig,
    weight_format,
)
from megastable.config.limits import LARGEST_BATCH, LARGEST_FACTOR
from megastable.config.lr_schedule import LrScheduleConfig
from megastable.config.model import ModelConfig
from megastable.config.parallelism import PipelineConfig, TensorParallelConfig
from megastable.config.section import Section
from megastable.config.stability import StabilityConfig
from megastable.config.training import CheckpointConfig, InitConfig, LoggingConfig, MonitorsConfig, TrainingConfig

CUSTOMARY_CLIP_NORM = 0.5
"""The global gradient norm that "auto" clips to: the customary one of a GPT, the only kind of model here."""


def _number_or_auto(value: object) -> object:
    # Before pydantic's own check, which would report a wrong value once as no number and once as not "auto".
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= LARGEST_FACTOR
    if value != "auto" and not is_number:
        raise PydanticCustomError("clip_norm", f'must be a number from 0 to {LARGEST_FACTOR:,.0f}, or "auto"')
    return value


ClipNorm = Annotated[
    float | Literal["auto"],
    BeforeValidator(
        _number_or_auto, json_schema_input_type=Annotated[float, Field(ge=0, le=LARGEST_FACTOR)] | Literal["auto"]
    ),
]


class MegastableConfig(Section):
    """Everything that DeepSpeed has no key for."""

    model: ModelConfig = Field(description="The model's shape and parts.")
    pipeline: PipelineConfig = Field(
        default_factory=PipelineConfig, description="How the layers are spread over pipeline stages."
    )
    tensor_parallel: TensorParallelConfig = Field(
        default_factory=TensorParallelConfig, description="How every layer is split over neighbouring processes."
    )
    batch_rampup: BatchRampupConfig = Field(description="How the global batch grows with the samples consumed.")
    lr_schedule: LrScheduleConfig = Field(
        default_factory=LrScheduleConfig, description="How the learning rate moves with the samples consumed."
    )
    init: InitConfig = Field(default_factory=InitConfig, description="Standard deviation of fresh weights.")
    data: DataConfig = Field(description="What the model reads.")
    training: TrainingConfig = Field(description="How long to train, and how to evaluate.")
    monitors: MonitorsConfig = Field(
        default_factory=MonitorsConfig, description="What is watched while a run goes on, and how often."
    )
    stability: StabilityConfig = Field(
        default_factory=StabilityConfig, description="What becomes of a step that stands out from those before it."
    )
    checkpoint: CheckpointConfig = Field(
        default_factory=CheckpointConfig,
        description="When to save, what to keep, and what to do where a save fails.",
    )
    logging: LoggingConfig = Field(default_factory=LoggingConfig, description="What is printed.")


class RunConfig(Section):
    """One run: DeepSpeed's own keys, plus the section "megastable"."""

    # Editors look for "$schema", which is not a legal name in Python.
    schema_reference: str | None = Field(
        default=None, alias="$schema", description="Path of this JSON Schema, for editors; not read."
    )
    train_micro_batch_size_per_gpu: int = Field(
        default=1,
        ge=1,
        le=LARGEST_BATCH,
        description="Samples of one micro-batch; megastable.batch_rampup.micro_batch_size_steps may change it later.",
    )
    # DeepSpeed's own default is no clipping; 1.0 is GPT-3's (Brown et al. 2020, appendix B).
    gradient_clipping: ClipNorm = Field(
        default=1.0,
        description='Gradients are scaled down to this global norm; 0 means no clipping, "auto" the customary value '
        f"of a GPT, {CUSTOMARY_CLIP_NORM}.",
    )
    # DeepSpeed's own default is the 16-bit format, which would round fp32 sums on their way between replicas.
    communication_data_type: Dtype | None = Field(
        default=None,
        description="Format in which gradients travel between replicas; null: fp32 where they are accumulated in fp32, "
        "else the format of the weights.",
    )
    optimizer: OptimizerConfig = Field(description="The optimizer.")
    fp16: Fp16Config = Field(default_factory=Fp16Config, description="float16 training with loss scaling.")
    bf16: Bf16Config = Field(default_factory=Bf16Config, description="bfloat16 training.")
    data_types: DataTypesConfig = Field(
        default_factory=DataTypesConfig, description="Number formats beside the weights' own."
    )
    zero_optimization: ZeroConfig = Field(
        default_factory=ZeroConfig, description="Spreading the optimizer state over replicas."
    )
    tensorboard: TensorboardConfig = Field(
        default_factory=TensorboardConfig, description="DeepSpeed's TensorBoard monitor."
    )
    wandb: WandbConfig = Field(default_factory=WandbConfig, description="DeepSpeed's Weights & Biases monitor.")
    comet: CometConfig = Field(default_factory=CometConfig, description="DeepSpeed's Comet monitor.")
    csv_monitor: CsvMonitorConfig = Field(default_factory=CsvMonitorConfig, description="DeepSpeed's CSV monitor.")
    megastable: MegastableConfig = Field(description="Everything that DeepSpeed has no key for.")

    @property
    def number_format(self) -> Dtype:
        """Return the format of the weights."""
        return weight_format(self.fp16, self.bf16)

    @property
    def clip_norm(self) -> float:
        """Return the global norm to which gradients are scaled down; 0 for no clipping."""
        return CUSTOMARY_CLIP_NORM if self.gradient_clipping == "auto" else self.gradient_clipping


def run_as_dict(run: RunConfig) -> dict[str, Any]:
    """Return the run file as plain values, with defaults filled in; loading it again gives an equal run."""
    # Without nulls: they mean the same as a missing key, and an older run would seem to differ in every newer key.
    return run.model_dump(mode="json", by_alias=True, exclude_none=True)


def differences(old: Any, new: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the dotted path and both values of every key in which two runs, as ``run_as_dict`` gives them, differ.

    None stands for a key that one of them lacks.
    """
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            yield from differences(old.get(key), new.get(key), f"{path}.{key}" if path else key)
    # A section that was written without keys asks for what one that was left out does.
    elif old != new and (old or new):
        yield path, old, new
