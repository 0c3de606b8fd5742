"""DeepSpeed's own sections of a run file, with DeepSpeed's names and meanings.

Only keys that the pipeline engine honours are here; ``refused_keys.py`` says why the others are not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from megastable.config.limits import LARGEST_FACTOR, LARGEST_SCALE_POWER, MOST_ELEMENTS, MOST_SAMPLES, MOST_STEPS
from megastable.config.reading.faults import Fault
from megastable.config.section import PathText, Section

Dtype = Literal["fp32", "bf16", "fp16"]
"""A number format by the name that DeepSpeed's keys give it."""
Beta = Annotated[float, Field(ge=0, lt=1)]


class AdamParams(Section):
    """Settings of Adam and AdamW."""

    lr: float = Field(
        gt=0,
        le=LARGEST_FACTOR,
        description="Highest learning rate, reached at the end of the warmup; see megastable.lr_schedule.",
    )
    # betas, eps and weight_decay are GPT-3's (Brown et al. 2020, appendix B). torch's own second beta, 0.999, averages
    # over about 1000 steps instead of 20, so that the update follows a change of the gradient late.
    betas: tuple[Beta, Beta] = Field(
        default=(0.9, 0.95), description="Decay rates of the running means of the gradient and of its square."
    )
    eps: float = Field(default=1e-8, gt=0, le=1, description="Added to the root of the second moment.")
    weight_decay: float = Field(
        default=0.1, ge=0, le=LARGEST_FACTOR, description="Decay of the matrices; biases and norms are not decayed."
    )
    # DeepSpeed's name for what torch has two classes for.
    adam_w_mode: bool = Field(
        default=True,
        description="Only for type Adam: true decouples the weight decay (AdamW), false adds it to the gradient "
        "(L2). As in DeepSpeed, Adam without this key is AdamW.",
    )
    fused: bool = Field(default=True, description="Use torch's fused Adam kernel where the device has one.")


class OptimizerConfig(Section):
    """The optimizer."""

    type: Literal["AdamW", "Adam"] = Field(description="AdamW, or Adam (see params.adam_w_mode).")
    params: AdamParams = Field(description="Settings of the optimizer.")


class Fp16Config(Section):
    """float16 training with loss scaling. Neither this nor bf16 enabled means float32."""

    # Every default of this section is DeepSpeed's own.
    enabled: bool = Field(default=False, description="Train in float16 with float32 master weights.")
    loss_scale: float = Field(
        default=0.0, ge=0, le=2.0**LARGEST_SCALE_POWER, description="A fixed loss scale; 0 means a dynamic one."
    )
    initial_scale_power: int = Field(
        default=16, ge=0, le=LARGEST_SCALE_POWER, description="The dynamic loss scale starts at 2 to this power."
    )
    loss_scale_window: int = Field(
        default=1000,
        ge=1,
        le=MOST_STEPS,
        description="Steps without overflow after which the dynamic loss scale doubles.",
    )
    hysteresis: int = Field(
        default=2,
        ge=1,
        le=MOST_STEPS,
        description="Overflowed steps that are tolerated before the dynamic loss scale halves.",
    )
    consecutive_hysteresis: bool = Field(
        default=False, description="Refill the hysteresis after every step without overflow."
    )
    min_loss_scale: int = Field(
        default=1, ge=1, le=2**LARGEST_SCALE_POWER, description="The dynamic loss scale never falls below this."
    )

    def can_fall(self, scale: float) -> bool:
        """Tell whether an overflow may be ended by a lower loss scale than ``scale``."""
        is_dynamic = self.enabled and self.loss_scale == 0  # 0 is DeepSpeed's word for a dynamic scale
        return is_dynamic and scale > self.min_loss_scale


class Bf16Config(Section):
    """bfloat16 training. Neither this nor fp16 enabled means float32."""

    enabled: bool = Field(default=False, description="Train in bfloat16 with float32 master weights.")
    # DeepSpeed's own default is false, which keeps all bf16 gradients until the micro-batch is done.
    immediate_grad_update: bool = Field(
        default=True,
        description="With float32 accumulation, add each gradient as soon as its backward made it "
        "instead of after the whole micro-batch; saves memory.",
    )


class DataTypesConfig(Section):
    """Number formats beside the weights' own."""

    grad_accum_dtype: Dtype | None = Field(
        default=None,
        description="Format in which gradients of micro-batches are summed; null is the format of the weights. "
        "fp32 is advised for bf16.",
    )


class ZeroConfig(Section):
    """ZeRO: the optimizer state is spread over the data-parallel replicas."""

    # refused_keys.py says of every other stage why it does not work.
    stage: int = Field(default=1, ge=1, le=1, description="Only 1 works under the pipeline engine, in every precision.")
    # DeepSpeed's own default is 500 million elements, 2 GB in fp32 even for a tiny model.
    reduce_bucket_size: int | None = Field(
        default=None,
        ge=1,
        le=MOST_ELEMENTS,
        description="Gradient elements reduced at once; null leaves the choice to megastable. DeepSpeed "
        "allocates two buffers of this size, but none for bf16 with fp32 sums; one replica reduces nothing.",
    )
    allgather_bucket_size: int | None = Field(
        default=None,
        ge=1,
        le=MOST_ELEMENTS,
        description="Weight elements gathered at once after a step; null leaves the choice to megastable.",
    )


class TensorboardConfig(Section):
    """DeepSpeed's TensorBoard monitor."""

    enabled: bool = Field(default=False, description="Write TensorBoard event files.")
    output_path: PathText = Field(default="", description="Folder of the event files; empty is DeepSpeed's default.")
    job_name: PathText = Field(default="DeepSpeedJobName", description="Subfolder of output_path for this run.")


class WandbConfig(Section):
    """DeepSpeed's Weights & Biases monitor."""

    enabled: bool = Field(default=False, description="Log to Weights & Biases.")
    group: str | None = Field(default=None, description="Group of runs that this one belongs to.")
    team: str | None = Field(default=None, description="Team (entity) that owns the run.")
    project: str = Field(default="deepspeed", description="Project that the run belongs to.")


class CometConfig(Section):
    """DeepSpeed's Comet monitor."""

    enabled: bool = Field(default=False, description="Log to Comet.")
    samples_log_interval: int = Field(
        default=100, ge=1, le=MOST_SAMPLES, description="Samples between two logged points."
    )
    project: str | None = Field(default=None, description="Project; null takes Comet's own configuration.")
    workspace: str | None = Field(default=None, description="Workspace; null takes Comet's own configuration.")
    # repr=False keeps the key out of logs and tracebacks.
    api_key: str | None = Field(
        default=None, repr=False, description="API key; better left null and given as COMET_API_KEY."
    )
    experiment_name: str | None = Field(default=None, description="Name of the experiment.")
    experiment_key: str | None = Field(default=None, description="Key of the experiment, 32 to 50 characters.")
    online: bool | None = Field(default=None, description="False stores the experiment locally.")
    mode: Literal["get", "create", "get_or_create"] | None = Field(
        default=None, description="Continue an experiment, start a new one, or whichever fits."
    )


class CsvMonitorConfig(Section):
    """DeepSpeed's CSV monitor."""

    enabled: bool = Field(default=False, description="Write one CSV file for each logged quantity.")
    output_path: PathText = Field(default="", description="Folder of the CSV files; empty is DeepSpeed's default.")
    job_name: PathText = Field(default="DeepSpeedJobName", description="Subfolder of output_path for this run.")


ACCUMULATION_DTYPES: dict[Dtype, tuple[Dtype, ...]] = {
    "fp32": ("fp32",),
    "bf16": ("bf16", "fp32"),
    "fp16": ("fp16", "fp32"),
}
"""Format of the weights -> formats in which their gradients may be accumulated."""


def weight_format(fp16: Fp16Config, bf16: Bf16Config) -> Dtype:
    """Return the format of the weights, of which at most one is enabled."""
    if fp16.enabled:
        return "fp16"
    if bf16.enabled:
        return "bf16"
    return "fp32"


def loss_scale_starts_above_minimum(fp16: Fp16Config) -> Iterator[Fault]:
    """Refuse a dynamic loss scale that starts below its own floor: it would jump up at the first overflow."""
    if fp16.enabled and fp16.loss_scale == 0 and 2**fp16.initial_scale_power < fp16.min_loss_scale:
        yield Fault(
            "fp16.initial_scale_power",
            fp16.initial_scale_power,
            f"2 to this power must be at least min_loss_scale ({fp16.min_loss_scale})",
        )


def adamw_decouples_weight_decay(optimizer: OptimizerConfig) -> Iterator[Fault]:
    """Refuse adam_w_mode false for AdamW, which DeepSpeed ignores: it asks for another optimizer than the name says."""
    if optimizer.type == "AdamW" and not optimizer.params.adam_w_mode:
        yield Fault("optimizer.params.adam_w_mode", False, 'has no effect on AdamW; for L2 decay write "type": "Adam"')
