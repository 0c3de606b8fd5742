"""From pydantic's errors to what a user reads: the key's path in the file, the nearest legal key, and what is legal."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pydantic_core import ErrorDetails

from megastable.config.refused_keys import REFUSED_VALUES
from megastable.config.run_config import RunConfig
from megastable.config.section import Section, keys_of, section_types, tag_of

Path = tuple[str | int, ...]

LEAST_LIKENESS: Final = 0.6
"""difflib ratio from which a key counts as a misspelling of another."""


@dataclass(frozen=True)
class Place:
    """Locates a key of the file: its path, and the section class that it belongs to (None inside lists)."""

    path: Path
    owner: type[Section] | None


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
        owner = candidates[0] if candidates else None
        field = keys_of(owner).get(str(part)) if owner else None
        candidates = section_types(field.annotation) if field else ()
    return Place(tuple(path), owner)


def dotted(path: Path) -> str:
    """Write the path as an override does, with list positions in brackets."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


def nearest_key(place: Place) -> str | None:
    """Find the legal key of the same section that the place's unknown key is most like."""
    legal = list(keys_of(place.owner)) if place.owner else []
    matches = difflib.get_close_matches(str(place.path[-1]), legal, n=1, cutoff=LEAST_LIKENESS)
    return matches[0] if matches else None


def paths_elsewhere(place: Place) -> list[str]:
    """List the dotted paths of the keys of other sections with exactly the place's name."""
    paths = (dotted(path) for path in _all_paths(RunConfig, ()) if path[-1] == place.path[-1])
    # Kinds of a section share keys, and so paths.
    return list(dict.fromkeys(paths))


def _all_paths(section: type[Section], prefix: Path) -> Iterator[Path]:
    for key, field in keys_of(section).items():
        yield (*prefix, key)
        for inner in section_types(field.annotation):
            yield from _all_paths(inner, (*prefix, key))


def message_for(error: ErrorDetails, place: Place) -> str:
    """Say in one phrase what is legal at ``place``; in pydantic's own words where they are clear."""
    refused = REFUSED_VALUES.get(dotted(place.path), {})
    value = error["input"]
    # A list could not be looked up, and true would be found as 1.
    if isinstance(value, int | str) and not isinstance(value, bool) and value in refused:
        return f"refused: {refused[value]}"
    if error["type"] in _MESSAGES:
        return _MESSAGES[error["type"]](error, place)
    return error["msg"].replace("Input should", "must")


def _missing(error: ErrorDetails, place: Place) -> str:
    if place.owner is None:
        return "is missing: the list is too short"
    return f"is required: {keys_of(place.owner)[str(place.path[-1])].description}"


def _whole_number(error: ErrorDetails, place: Place) -> str:
    value = error["input"]
    hint = f"; write {int(value)}" if isinstance(value, float) and value.is_integer() else ""
    return f"must be a whole number, without point, exponent or quotes{hint}"


def _number(error: ErrorDetails, place: Place) -> str:
    return "must be a number, without quotes"


def _boolean(error: ErrorDetails, place: Place) -> str:
    return "must be true or false, without quotes"


def _section(error: ErrorDetails, place: Place) -> str:
    return "must be a section: {...}"


def _list(error: ErrorDetails, place: Place) -> str:
    return "must be a list: [...]"


def _too_long(error: ErrorDetails, place: Place) -> str:
    return f"must have at most {error['ctx']['max_length']} entries"


def _tag(error: ErrorDetails, place: Place) -> str:
    field = keys_of(place.owner)[str(place.path[-1])] if place.owner else None
    tags = [json.dumps(tag_of(kind)) for kind in section_types(field.annotation)] if field else []
    keys = list(error["input"]) if isinstance(error["input"], dict) else []
    misspelt = difflib.get_close_matches("type", keys, n=1) if "type" not in keys else []
    hint = f'; did you mean "type" by {json.dumps(misspelt[0])}?' if misspelt else ""
    return f'"type" must be {" or ".join(tags)}{hint}'


_MESSAGES: Mapping[str, Callable[[ErrorDetails, Place], str]] = {
    "missing": _missing,
    "int_type": _whole_number,
    "int_from_float": _whole_number,
    "float_type": _number,
    "bool_type": _boolean,
    "model_type": _section,
    "model_attributes_type": _section,
    "dict_type": _section,
    "tuple_type": _list,
    "union_tag_not_found": _tag,
    "union_tag_invalid": _tag,
    "too_long": _too_long,
}
"""pydantic's error type -> the phrase."""
