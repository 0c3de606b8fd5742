"""The guard of a run: which steps stand out, and what becomes of them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megastable.config.limits import LARGEST_FACTOR, MOST_STEPS
from megastable.config.section import Section

SMALLEST_WINDOW_STEPS = 16
LARGEST_WINDOW_STEPS = 4096
"""Windows are sorted in every step and stand in every checkpoint."""


class StabilityConfig(Section):
    """What becomes of a step that stands out from those before it."""

    guard: Literal["warn", "skip", "rollback", "stop"] = Field(
        default="warn",
        description="A step whose loss or gradient norm stands out: warn: it is told; skip: its update is not applied; "
        "rollback: as well, and where the loss jumped or rises for long the run goes back to its last good state, in "
        "memory, and leaves out the samples since then; stop: the run ends.",
    )
    window_steps: int = Field(
        default=128,
        ge=SMALLEST_WINDOW_STEPS,
        le=LARGEST_WINDOW_STEPS,
        description="Steps with which a step is compared; the first fourth of them, or 16, are not judged.",
    )
    spike_deviations: float = Field(
        default=8.0,
        gt=0,
        le=LARGEST_FACTOR,
        description="Robust standard deviations above the median at which loss or gradient norm stand out.",
    )
    divergence_margin: float = Field(
        default=0.5,
        gt=0,
        le=LARGEST_FACTOR,
        description="How far above its lowest value the smoothed loss is too high.",
    )
    divergence_steps: int = Field(
        default=50, ge=1, le=MOST_STEPS, description="Steps in a row of a loss that is too high until it is told."
    )
    snapshot_interval: int = Field(
        default=50,
        ge=1,
        le=MOST_STEPS,
        description="Steps between two copies of the state in host memory, to which a rollback returns; two are held, "
        "12 bytes each for each parameter whose optimizer state a process holds.",
    )
    max_rollbacks: int = Field(
        default=3,
        ge=1,
        le=MOST_STEPS,
        description="Rollbacks within rollback_window_steps after which the run stops instead of going back once more.",
    )
    rollback_window_steps: int = Field(
        default=1000, ge=1, le=MOST_STEPS, description="Steps within which rollbacks are counted."
    )
