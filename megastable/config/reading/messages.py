"""From pydantic's errors to what a user reads: the key's path in the file, the nearest legal key, and what is legal."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from megastable.config.refused_keys import REFUSED_VALUES
from megastable.config.run_config import RunConfig
from megastable.config.section import Section, keys_of, section_types, tag_of

Path = tuple[str | int, ...]

LEAST_LIKENESS: Final = 0.6
"""difflib's ratio from which a key counts as a misspelling of another; its own default."""


@dataclass(frozen=True)
class Place:
    """Locates a key of the file: its path, and the section class that it belongs to (None inside lists)."""

    path: Path
    owner: type[Section] | None

    @property
    def legal_keys(self) -> dict[str, FieldInfo]:
        """Return the keys of the section around it."""
        return keys_of(self.owner) if self.owner else {}

    @property
    def field(self) -> FieldInfo | None:
        """Return what the schema says of the key; None for an unknown key and inside lists."""
        return self.legal_keys.get(str(self.path[-1]))


def place_of(location: Sequence[str | int]) -> Place:
    """Turn a pydantic error location into a path of the file."""
    path: list[str | int] = []
    owner: type[Section] | None = None
    candidates: tuple[type[Section], ...] = (RunConfig,)
    for part in location:
        if len(candidates) > 1:
            # pydantic puts the tag of a section with a "type" into the location, where the file has no such key.
            candidates = tuple(kind for kind in candidates if tag_of(kind) == part)
            continue
        path.append(part)
        if isinstance(part, int):
            # An entry of a list: the section that the list is of, if any.
            owner = None
            continue
        owner = candidates[0] if candidates else None
        field = Place(tuple(path), owner).field
        candidates = section_types(field.annotation) if field else ()
    return Place(tuple(path), owner)


def dotted(path: Path) -> str:
    """Write the path as an override does, with list positions in brackets."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


def nearest_key(place: Place) -> str | None:
    """Find the legal key of the same section that the place's unknown key is most like."""
    matches = difflib.get_close_matches(str(place.path[-1]), place.legal_keys, n=1, cutoff=LEAST_LIKENESS)
    return matches[0] if matches else None


def paths_elsewhere(place: Place) -> list[str]:
    """List the dotted paths of the keys of other sections with exactly the place's name."""
    paths = (dotted(path) for path in _all_paths(RunConfig, ()) if path[-1] == place.path[-1])
    # Kinds of a section share keys, and so paths.
    return list(dict.fromkeys(paths))


def _all_paths(section: type[Section], prefix: Path) -> Iterator[Path]:
    for key, field in keys_of(section).items():
        yield (*prefix, key)
        # Keys of a list's entries have as many paths as there are entries.
        if get_origin(field.annotation) is tuple:
            continue
        for inner in section_types(field.annotation):
            yield from _all_paths(inner, (*prefix, key))


def message_for(error: ErrorDetails, place: Place) -> str:
    """Say in one phrase what is legal at ``place``; in pydantic's own words where they are clear."""
    refused = REFUSED_VALUES.get(dotted(place.path), {})
    value = error["input"]
    # A list could not be looked up, and true would be found as 1.
    if isinstance(value, int | str) and not isinstance(value, bool) and value in refused:
        return f"refused: {refused[value]}"
    if error["type"] in _PHRASES:
        return _PHRASES[error["type"]]
    if error["type"] in _MESSAGES:
        return _MESSAGES[error["type"]](error, place)
    # "Input should be at most 4" reads as advice, and a run with such a value is refused.
    return error["msg"].replace("Input should", "must")


def _missing(error: ErrorDetails, place: Place) -> str:
    # Only entries of a list lie outside every section.
    if place.field is None:
        return "is missing: the list is too short"
    return f"is required: {place.field.description}"


def _whole_number(error: ErrorDetails, place: Place) -> str:
    value = error["input"]
    # 5e8 is a float in JSON, even though its value is whole.
    hint = f"; write {int(value)}" if isinstance(value, float) and value.is_integer() else ""
    return f"must be a whole number, without point, exponent or quotes{hint}"


def _too_long(error: ErrorDetails, place: Place) -> str:
    return f"must have at most {error['ctx']['max_length']} entries"


def _pattern(error: ErrorDetails, place: Place) -> str:
    return f"must match the pattern {error['ctx']['pattern']}"


def _tag(error: ErrorDetails, place: Place) -> str:
    assert place.field is not None
    tags = " or ".join(json.dumps(tag_of(kind)) for kind in section_types(place.field.annotation))
    # Without its "type" pydantic does not know the section's keys, so a misspelt one is looked for here.
    given = list(error["input"]) if isinstance(error["input"], dict) else []
    if "type" not in given:
        for misspelt in difflib.get_close_matches("type", given, n=1):
            return f'"type" must be {tags}; did you mean "type" by {json.dumps(misspelt)}?'
    return f'"type" must be {tags}'


_PHRASES: Mapping[str, str] = {
    "float_type": "must be a number, without quotes",
    "bool_type": "must be true or false, without quotes",
    "model_type": "must be a section: {...}",
    "model_attributes_type": "must be a section: {...}",
    "dict_type": "must be a section: {...}",
    "tuple_type": "must be a list: [...]",
}
"""pydantic's error type -> the phrase, where the value does not matter."""

_MESSAGES: Mapping[str, Callable[[ErrorDetails, Place], str]] = {
    "missing": _missing,
    "int_type": _whole_number,
    "int_from_float": _whole_number,
    "union_tag_not_found": _tag,
    "union_tag_invalid": _tag,
    "too_long": _too_long,
    "string_pattern_mismatch": _pattern,
}
"""pydantic's error type -> the phrase for a value at a place."""
