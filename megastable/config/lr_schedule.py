"""The learning-rate schedule of a run file, and the rule that every schedule is given its own keys only."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields
from fractions import Fraction
from typing import Annotated

from pydantic import Field

from megastable.config.limits import LARGEST_FACTOR
from megastable.config.reading.faults import Fault
from megastable.config.section import Amount, AmountField, RegisteredName, Section
from megastable.core.lr_schedule import BATCH_SCALING_EXPONENTS, LR_SCHEDULES

DEFAULT_STABLE_SHARE = Fraction(4, 5)
"""Where the constant part ends by default, as a share of the way to the decay's end."""
DEFAULT_STEP_INTERVAL = Amount(fraction=0.1)
DEFAULT_STEP_FACTOR = 0.5

SCHEDULE_FIELDS = {
    "decay": "end_samples",
    "min_lr": "min_lr",
    "stable": "stable_samples",
    "step_interval": "step_interval_samples",
    "step_factor": "step_factor",
}
"""Key that not every type reads -> the field of the schedules that do."""


class LrScheduleConfig(Section):
    """Linear warmup to optimizer.params.lr, then a decay to min_lr; counted in samples, so no ramp stretches it.

    A key that the type does not read is refused.
    """

    type: Annotated[str, RegisteredName(LR_SCHEDULES)] = Field(default="cosine", description="Shape of the decay.")
    warmup: AmountField = Field(
        default=Amount(fraction=0.05), description="Length of the linear warmup from 0; 0 means no warmup."
    )
    decay: AmountField = Field(
        default=Amount(fraction=1.0),
        description="Where the decay ends, counted from the start of the run. Not read by constant.",
    )
    min_lr: float = Field(
        default=0.0,
        ge=0,
        le=LARGEST_FACTOR,
        description="Learning rate at the end of the decay and from there on. Not read by constant.",
    )
    stable: AmountField | None = Field(
        default=None,
        description="warmup_stable_decay only: where the constant part ends and the decay begins, counted from the "
        f"start of the run; null: at {float(DEFAULT_STABLE_SHARE):.0%} of the way to the decay's end.",
    )
    step_interval: AmountField | None = Field(
        default=None,
        description="step only: length of each level after the warmup; null: "
        f"{DEFAULT_STEP_INTERVAL.fraction:.0%} of the run.",
    )
    step_factor: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        default=None,
        description=f"step only: what each level is of the one before; null: {DEFAULT_STEP_FACTOR}.",
    )
    batch_scaling: Annotated[str, RegisteredName(BATCH_SCALING_EXPONENTS)] = Field(
        default="none",
        description="How the peak follows the global batch: optimizer.params.lr belongs to the ramp's final batch, and "
        "a smaller one has it times (batch / final batch) to the power 0 (none), 1/2 (sqrt) or 1 (linear), but not "
        "less than min_lr, which is not scaled.",
    )

    def reads(self, key: str) -> bool:
        """Tell whether the type reads ``key``, one of ``SCHEDULE_FIELDS``."""
        return self.type in types_that_read(key)


def types_that_read(key: str) -> list[str]:
    """List the schedules that read ``key``, one of ``SCHEDULE_FIELDS``."""
    # The fields of a schedule's class are the truth, so that a new schedule needs no second list of its keys.
    return [
        name
        for name, schedule in LR_SCHEDULES.items()
        if SCHEDULE_FIELDS[key] in {field.name for field in fields(schedule)}
    ]


def lr_keys_belong_to_the_type(lr_schedule: LrScheduleConfig) -> Iterator[Fault]:
    """Refuse a key that the type would ignore, unless it stands at its default and so asks for nothing."""
    # By value and not by presence: a run's own dump, which has to load again, names every key.
    values = lr_schedule.model_dump()
    defaults = LrScheduleConfig().model_dump()
    for key in SCHEDULE_FIELDS:
        if values[key] != defaults[key] and not lr_schedule.reads(key):
            yield Fault(
                f"megastable.lr_schedule.{key}",
                values[key],
                f'is not read by the type "{lr_schedule.type}", only by {", ".join(types_that_read(key))}; remove it '
                f"(an override sets it to {json.dumps(defaults[key])})",
            )
