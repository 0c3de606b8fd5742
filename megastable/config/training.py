"""Sections of a run but for its model, data and batches: first weights, length, monitors, checkpoints, logging."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from megastable.config.limits import (
    LARGEST_FACTOR,
    LONGEST_HANG_SECONDS,
    MOST_PROCESSES,
    MOST_SAMPLES,
    MOST_SECONDS,
    MOST_STEPS,
    MOST_TOKENS,
    SHORTEST_HANG_SECONDS,
)
from megastable.config.reading.faults import Fault
from megastable.config.section import RegisteredName, Section
from megastable.core.batch_rampup import goes_on
from megastable.core.init_std import INIT_SCHEMES

LARGEST_SEED = 2**32 - 1
"""The largest seed that NumPy's generators take."""


class InitConfig(Section):
    """Standard deviation of fresh weights."""

    # The default scheme and the scaling of residual projections keep activations from growing with the width (Smith et
    # al., arXiv 2201.11990, section 3.2) and with the depth (Radford et al. 2019, GPT-2, section 2.3).
    scheme: Annotated[str, RegisteredName(INIT_SCHEMES)] = Field(
        default="megatron_530b",
        description="megatron_530b: sqrt(1/(3 hidden_size)); transformers_without_tears: sqrt(2/(5 hidden_size)); "
        "xavier: sqrt(2/(fan_in + fan_out)) of each matrix; fixed: std.",
    )
    std: float | None = Field(
        default=None,
        gt=0,
        le=LARGEST_FACTOR,
        description="Standard deviation; needed by, and only legal with, the scheme fixed.",
    )
    residual_scaling: bool = Field(
        default=True,
        description="Divide the std of projections that write into the residual stream by sqrt(2 num_layers).",
    )
    embedding_std: float | None = Field(
        default=None,
        gt=0,
        le=LARGEST_FACTOR,
        description="Standard deviation of the token embedding (and a tied head); null: the scheme's.",
    )
    head_std: float | None = Field(
        default=None, gt=0, le=LARGEST_FACTOR, description="Standard deviation of an untied head; null: the scheme's."
    )


CLOCK_PATTERN = r"^(?:(\d{1,4})-)?(\d{1,5}):([0-5]\d):([0-5]\d)$"


def _seconds_or_clock(value: object) -> object:
    """Return a number of seconds, which a text like SLURM's ``--time`` gives as well; null stays null."""
    if value is None:
        return None
    clock = re.fullmatch(CLOCK_PATTERN, value, re.ASCII) if isinstance(value, str) else None
    if clock is not None:
        days, hours, minutes, seconds = (int(part or 0) for part in clock.groups())
        value = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    # To Python, JSON's true is the number 1.
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= MOST_SECONDS:
        return float(value)
    raise PydanticCustomError(
        "duration",
        'must be a number of seconds above 0, or a text "HH:MM:SS" or "D-HH:MM:SS"; at most {most} seconds',
        {"most": MOST_SECONDS},
    )


def _range_of_samples(value: object) -> object:
    # Python has no JSON array of two: a list comes in, a tuple goes on.
    if isinstance(value, list | tuple) and len(value) == 2:
        first, after = value
        are_numbers = all(isinstance(number, int) and not isinstance(number, bool) for number in value)
        if are_numbers and 0 <= first < after <= MOST_SAMPLES:
            return (first, after)
    raise PydanticCustomError("range", "must be [first, after the last], two whole numbers from 0, the second larger")


SampleRange = Annotated[
    tuple[int, int],
    BeforeValidator(
        _range_of_samples,
        json_schema_input_type=Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=2, max_length=2)],
    ),
]
"""The type of a key that holds a range of positions in the order of the samples."""

MOST_RANGES = 1000
"""More are a filter of the data, and looked up in every step."""

Duration = Annotated[
    float | None,
    BeforeValidator(
        _seconds_or_clock,
        json_schema_input_type=Annotated[float, Field(gt=0, le=MOST_SECONDS)]
        | Annotated[str, Field(pattern=CLOCK_PATTERN)]
        | None,
    ),
]
"""The type of a key that holds a length of time, in seconds or as on a clock; null for none."""


class TrainingConfig(Section):
    """How long to train, and how to evaluate."""

    total_samples: int | None = Field(
        default=None, ge=1, le=MOST_SAMPLES, description="Samples of the whole run; or give total_steps."
    )
    total_steps: int | None = Field(
        default=None, ge=1, le=MOST_STEPS, description="Optimizer steps of the whole run; or give total_samples."
    )
    seed: int = Field(
        default=1234, ge=0, le=LARGEST_SEED, description="Seed of the weights, the dropout and the data order."
    )
    eval_interval: int = Field(
        default=0, ge=0, le=MOST_STEPS, description="Steps between two evaluations; 0 means never."
    )
    eval_samples: int = Field(
        default=256, ge=1, le=MOST_SAMPLES, description="Most validation samples of one evaluation."
    )
    time_limit: Duration = Field(
        default=None,
        description='Seconds, or "HH:MM:SS", after which the processes of a run have ended: it stops and saves while '
        "a save still fits. Counted from the start of the process; null: no limit.",
    )
    skip_samples: tuple[SampleRange, ...] = Field(
        default=(),
        max_length=MOST_RANGES,
        description="Ranges [first, after the last] of positions in the order of the samples that are left out, such "
        "as [[4000, 4096]]; a run counts its position as data_position in its metrics.",
    )
    # For runs that have to be reproduced: another number of processes changes the order of floating-point sums.
    world_size: int | None = Field(
        default=None,
        ge=1,
        le=MOST_PROCESSES,
        description="Processes that this file is meant for; a launch with another number is refused.",
    )
    # Chowdhery et al. (PaLM), arXiv 2204.02311, section 5.
    z_loss: float = Field(
        default=0.0,
        ge=0,
        le=LARGEST_FACTOR,
        description="Weight of the squared log of the softmax's normaliser in the gradient; 1e-4 is customary.",
    )
    loss_chunk_tokens: int | None = Field(
        default=None,
        ge=1,
        le=MOST_TOKENS,
        description="Logits and loss of so many tokens of a micro-batch at a time, computed again in the backward "
        "pass: saves memory where the vocabulary is large, for one more product with the head. null: all at once.",
    )
    hang_timeout: int = Field(
        default=600,
        ge=SHORTEST_HANG_SECONDS,
        le=LONGEST_HANG_SECONDS,
        description="Seconds without progress of any rank, or without a sign of life of one, within which the run ends "
        "with the stacks of a rank that is stuck and of one that waits; more than the longest step takes.",
    )
    # DeepSpeed refuses fp16 on a CPU without native fp16; torch computes it all the same, only slowly.
    fp16_on_cpu: bool = Field(
        default=False, description="Allow fp16 on a CPU, where its arithmetic is slow: for trying things out."
    )

    def goes_on(self, step: int, consumed_samples: int) -> bool:
        """Tell whether another step follows ``step`` steps that have consumed so many samples."""
        return goes_on(step, consumed_samples, self.total_steps, self.total_samples)


class MonitorsConfig(Section):
    """What is watched while a run goes on, and how often."""

    # A look reads every weight and update once more, which is why it is not taken at every step.
    interval: int = Field(
        default=10,
        ge=0,
        le=MOST_STEPS,
        description="Steps between two looks at every layer (norms, updates, maxima); 0 means only after a skip.",
    )
    consistency_interval: int = Field(
        default=100,
        ge=0,
        le=MOST_STEPS,
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
        le=MOST_STEPS,
        description="Skips in a row at a loss scale that cannot fall (or without one) that stop the run.",
    )


class CheckpointConfig(Section):
    """When to save, what to keep, and what to do where a save fails."""

    save_interval: int | None = Field(
        default=0,
        ge=0,
        le=MOST_STEPS,
        description="Steps between two checkpoints; 0: after the last step only; null: none, and the weights are lost.",
    )
    asynchronous: bool = Field(
        default=True,
        description="Write a checkpoint in the background, from a copy in host memory (12 bytes for each parameter "
        "whose optimizer state a process holds); false: training waits until it is written.",
    )
    keep_last: int | None = Field(
        default=None,
        ge=1,
        le=MOST_STEPS,
        description="Keep the newest checkpoints, so many, and delete older ones; null: keep all.",
    )
    keep_every: int | None = Field(
        default=None,
        ge=1,
        le=MOST_STEPS,
        description="Beside keep_last, keep the checkpoints whose step is a multiple of this.",
    )
    keep_best: int | None = Field(
        default=None,
        ge=1,
        le=MOST_STEPS,
        description="Beside keep_last, keep the checkpoints with the lowest validation losses, so many.",
    )
    on_failure: Literal["continue", "stop"] = Field(
        default="continue",
        description="A save that fails (full disk, unwritable folder) is a warning and an event. continue: the run "
        "goes on with the last good checkpoint and tries again at the next interval; stop: it ends.",
    )


class LoggingConfig(Section):
    """What is printed."""

    interval: int = Field(default=10, ge=1, le=MOST_STEPS, description="Steps between two printed lines.")


def std_belongs_to_fixed(init: InitConfig) -> Iterator[Fault]:
    """Require a std with the scheme fixed, and refuse one with the others: they compute it and would ignore it."""
    if init.scheme == "fixed" and init.std is None:
        yield Fault("megastable.init.std", None, 'must be a number above 0 with the scheme "fixed"')
    if init.scheme != "fixed" and init.std is not None:
        yield Fault(
            "megastable.init.std", init.std, f'is only legal with the scheme "fixed", not "{init.scheme}"; remove it'
        )


def kept_beside_the_last(checkpoint: CheckpointConfig) -> Iterator[Fault]:
    """Refuse to name checkpoints to keep where all are kept anyway."""
    for key in ("keep_every", "keep_best"):
        value = getattr(checkpoint, key)
        if value is not None and checkpoint.keep_last is None:
            yield Fault(f"megastable.checkpoint.{key}", value, "needs keep_last; without it all checkpoints are kept")


def keep_every_meets_the_saves(checkpoint: CheckpointConfig) -> Iterator[Fault]:
    """Require that a checkpoint is saved at every step that is to be kept."""
    if checkpoint.keep_every and checkpoint.save_interval and checkpoint.keep_every % checkpoint.save_interval:
        yield Fault(
            "megastable.checkpoint.keep_every",
            checkpoint.keep_every,
            f"must be a multiple of save_interval ({checkpoint.save_interval}), or these steps are not saved",
        )


def one_run_length(training: TrainingConfig) -> Iterator[Fault]:
    """Require that a run ends after a number of samples or of steps, not both."""
    given = training.model_dump(include={"total_samples", "total_steps"}, exclude_none=True)
    if len(given) != 1:
        yield Fault(
            "megastable.training",
            given,
            "give exactly one of total_samples and total_steps (an override sets the other one to null)",
        )
