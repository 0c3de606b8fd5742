"""The base of every section of a run file.

Values that name an entry of a registry.

A stretch of training, written in samples, tokens or a share of the run.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_serializer, model_validator
from pydantic_core import PydanticCustomError


class Section(BaseModel):
    """A JSON object of the run file: unknown keys are refused, types are not converted, instances are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def must_be_registered(name: str, registry: Iterable[str]) -> str:
    """Return ``name``; raises the field's error, which lists the legal names, when ``registry`` lacks it."""
    names = list(registry)
    if name not in names:
        legal = ", ".join(repr(legal) for legal in names)
        raise PydanticCustomError("not_registered", "must be one of {legal}", {"legal": legal})
    return name


class Amount(Section):
    """Exactly one of samples, tokens and fraction. In a run file a bare whole number means samples."""

    samples: int | None = Field(default=None, ge=0, description="Samples.")
    tokens: int | None = Field(default=None, ge=0, description="Tokens; counted in whole samples, rounded down.")
    fraction: float | None = Field(
        default=None, ge=0, le=1, description="Share of the whole run's samples, 0 to 1; rounded down."
    )

    @model_validator(mode="after")
    def _exactly_one_unit(self) -> Amount:
        if (self.samples, self.tokens, self.fraction).count(None) != 2:
            raise _amount_error()
        return self

    @model_serializer
    def _only_the_given_unit(self) -> dict[str, int | float]:
        units = {"samples": self.samples, "tokens": self.tokens, "fraction": self.fraction}
        return {unit: value for unit, value in units.items() if value is not None}

    def to_samples(self, total_samples: int, seq_length: int) -> int:
        """The amount in samples, for a run of ``total_samples`` samples of ``seq_length`` tokens; rounded down."""
        if self.samples is not None:
            return self.samples
        if self.tokens is not None:
            return self.tokens // seq_length
        # The fraction as it was written: 0.29 of 100 is 29, which binary floats would make 28.
        return int(Fraction(str(self.fraction)) * total_samples)


def _amount_error() -> PydanticCustomError:
    return PydanticCustomError(
        "amount",
        'must be a whole number of samples, or an object with exactly one of "samples", "tokens" and "fraction"',
    )


def _number_means_samples(value: object) -> object:
    if isinstance(value, dict | Amount):
        return value
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return Amount(samples=value)
    raise _amount_error()


AmountField = Annotated[
    Amount, BeforeValidator(_number_means_samples, json_schema_input_type=Annotated[int, Field(ge=0)] | Amount)
]
"""The type of a key that holds an amount."""
