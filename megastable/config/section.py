"""What the sections of a run file are made of: their base class, their keys, and types of keys that several share."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Any, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    model_serializer,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from megastable.config.limits import LONGEST_PATH, LONGEST_PATH_PART, MOST_SAMPLES, MOST_TOKENS


class Section(BaseModel):
    """A JSON object of the run file: unknown keys are refused, types are not converted, instances are frozen."""

    # strict: pydantic would read "8" as 8 and true as 1, other readers of the same file would not.
    # allow_inf_nan: Python's JSON parser takes NaN, with which every comparison of a rule is silently false.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def keys_of(section: type[Section]) -> dict[str, FieldInfo]:
    """Return the section's fields by the names that they have in the file."""
    return {field.alias or name: field for name, field in section.model_fields.items()}


def section_types(annotation: Any) -> tuple[type[Section], ...]:
    """List the section classes that a field may hold; none for a plain value."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return kinds_of(annotation)
    return tuple(kind for part in get_args(annotation) for kind in section_types(part))


def kinds_of(section: type[Section]) -> tuple[type[Section], ...]:
    """List the sections that a section stands for: its direct subclasses, or itself where it has none.

    A section with subclasses is always one that comes in kinds, and a kind has no kinds of its own.
    """
    return tuple(section.__subclasses__()) or (section,)


def tag_of(section: type[Section]) -> str:
    """Return the "type" by which the file chooses this section among several."""
    (tag,) = get_args(section.model_fields["type"].annotation)
    return str(tag)


class ChosenByType:
    """Marks a key whose section comes in kinds: the section's "type" names the subclass that it is checked against.

    Subclassing the section is all that a new kind needs; no union lists the kinds a second time.
    """

    def __get_pydantic_core_schema__(self, section: type[Section], handler: GetCoreSchemaHandler) -> CoreSchema:
        """Build pydantic's schema of the choice; pydantic calls it."""
        choices = {tag_of(kind): handler.generate_schema(kind) for kind in kinds_of(section)}
        return core_schema.tagged_union_schema(choices, discriminator="type")


@dataclass(frozen=True, eq=False)  # by identity: a union with null hashes it, and a registry has no hash
class RegisteredName:
    """Marks a text key that names an entry of a registry: other names are refused, and the schema lists the legal ones.

    The registry is read at every check, so that an entry which is added later is legal as well.
    """

    registry: Collection[str]

    def __get_pydantic_core_schema__(self, text: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Build pydantic's schema of the key; pydantic calls it."""
        # Before the type is checked, so that a number in place of a name is answered with the names as well.
        return core_schema.no_info_before_validator_function(self._must_be_registered, handler(text))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Add the legal names to the JSON Schema of the key; pydantic calls it."""
        return {**handler(schema), "enum": list(self.registry)}

    def _must_be_registered(self, value: object) -> object:
        names = list(self.registry)
        if value not in names:
            legal = ", ".join(repr(name) for name in names)
            raise PydanticCustomError("not_registered", "must be one of {legal}", {"legal": legal})
        return value


def _fits_a_file_system(path: str) -> str:
    # Named here, with its key: the operating system would refuse it only where it is first opened.
    parts = path.encode("utf-8", "replace").split(b"/")
    too_long = len(b"/".join(parts)) > LONGEST_PATH or max(map(len, parts)) > LONGEST_PATH_PART
    if "\0" in path or too_long:
        raise PydanticCustomError(
            "path",
            "must be a path: at most {part} bytes a name and {all} in all, and no character of code 0",
            {"part": LONGEST_PATH_PART, "all": LONGEST_PATH},
        )
    return path


PathText = Annotated[str, AfterValidator(_fits_a_file_system)]
"""The type of a key that names a file or folder, which need not exist."""


class Amount(Section):
    """Exactly one of samples, tokens and fraction. In a run file a bare whole number means samples."""

    samples: int | None = Field(default=None, ge=0, le=MOST_SAMPLES, description="Samples.")
    tokens: int | None = Field(
        default=None, ge=0, le=MOST_TOKENS, description="Tokens; counted in whole samples, rounded down."
    )
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
        # With nulls for the other units the dump of a run would not load again.
        units = {"samples": self.samples, "tokens": self.tokens, "fraction": self.fraction}
        return {unit: value for unit, value in units.items() if value is not None}

    def to_samples(self, total_samples: int, seq_length: int) -> int:
        """Count the amount in samples, for a run of ``total_samples`` of ``seq_length`` tokens each; rounded down."""
        if self.samples is not None:
            return self.samples
        if self.tokens is not None:
            return self.tokens // seq_length
        # Through the decimal that was written: 0.29 of 100 is 29, which binary floats would make 28.
        return int(Fraction(str(self.fraction)) * total_samples)


def _amount_error() -> PydanticCustomError:
    return PydanticCustomError(
        "amount",
        f"must be a whole number of samples (at most {MOST_SAMPLES}), or an object with exactly one of "
        '"samples", "tokens" and "fraction"',
    )


def _number_means_samples(value: object) -> object:
    if isinstance(value, dict | Amount):
        return value
    # To Python, JSON's true is the number 1.
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_SAMPLES:
        return Amount(samples=value)
    raise _amount_error()


AmountField = Annotated[
    Amount,
    BeforeValidator(
        _number_means_samples, json_schema_input_type=Annotated[int, Field(ge=0, le=MOST_SAMPLES)] | Amount
    ),
]
"""The type of a key that holds an amount."""
