"""The learning-rate schedule."""

from __future__ import annotations

from pydantic import Field, field_validator

from megastable.config.amount import Amount, AmountField
from megastable.config.registered_name import must_be_registered
from megastable.config.section import Section
from megastable.core.lr_schedule import LR_SCHEDULES


class LrScheduleConfig(Section):
    """Linear warmup to optimizer.params.lr, then a decay to min_lr; counted in samples, so no ramp stretches it."""

    type: str = Field(
        default="cosine", json_schema_extra={"enum": list(LR_SCHEDULES)}, description="Shape of the decay."
    )
    warmup: AmountField = Field(
        default=Amount(fraction=0.05), description="Length of the linear warmup from 0; 0 means no warmup."
    )
    decay: AmountField = Field(
        default=Amount(fraction=1.0), description="Where the decay ends, counted from the start of the run."
    )
    min_lr: float = Field(default=0.0, ge=0, description="Learning rate at the end of the decay and from there on.")

    @field_validator("type")
    @classmethod
    def _registered(cls, name: str) -> str:
        return must_be_registered(name, LR_SCHEDULES)
