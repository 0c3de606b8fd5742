"""What is legal, in one phrase, for each kind of field fault."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping

from pydantic_core import ErrorDetails

from megastable.config.key_paths import Place, dotted, keys_of, section_types, tag_of
from megastable.config.refused_keys import REFUSED_VALUES


def message_for(error: ErrorDetails, place: Place) -> str:
    """The phrase for a pydantic error at ``place``; pydantic's own words where they do."""
    refused = REFUSED_VALUES.get(dotted(place.path), {})
    value = error["input"]
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
