"""Reading JSON so that no key is lost: the standard parser silently keeps the last of two equal keys.

Overrides of single keys, ``path.to.key=value``, as the command line gives them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from megastable.config.reading.faults import NO_VALUE, Fault


class _Pairs(list[tuple[str, Any]]):
    """A JSON object with its keys as they stand, repeated ones too."""


def parse_json(text: str, prefix: str = "") -> tuple[Any, list[Fault]]:
    """Parse ``text``; the faults name every repeated key, with ``prefix`` as the path of the whole value.

    Raises:
        json.JSONDecodeError: not JSON.
        ValueError: a number too long to read.
    """
    faults: list[Fault] = []
    return _plain(json.loads(text, object_pairs_hook=_Pairs), prefix, faults), faults


def _plain(value: Any, path: str, faults: list[Fault]) -> Any:
    if isinstance(value, _Pairs):
        result: dict[str, Any] = {}
        for key, item in value:
            item_path = f"{path}.{key}".removeprefix(".")
            plain_item = _plain(item, item_path, faults)
            if key in result:
                faults.append(Fault(item_path, plain_item, "given twice; remove one of them"))
            result[key] = plain_item
        return result
    if isinstance(value, list):
        return [_plain(item, f"{path}[{index}]", faults) for index, item in enumerate(value)]
    return value


def apply_overrides(raw: dict[str, Any], overrides: Sequence[str]) -> list[Fault]:
    """Write each override into ``raw``, in order, making sections where there are none; returns the faults.

    A value is read as JSON, or as a bare string where it is not JSON: ``lr=1e-4`` is a number, ``type=cosine`` text.
    """
    faults: list[Fault] = []
    for override in overrides:
        path, equals, text = override.partition("=")
        keys = path.strip().split(".")
        if not equals or not all(keys):
            faults.append(Fault("", NO_VALUE, f"override {override!r}: must be path.to.key=value"))
            continue
        value, value_faults = _read_value(text, path)
        faults += value_faults + _write(raw, keys, value)
    return faults


def _read_value(text: str, path: str) -> tuple[Any, list[Fault]]:
    try:
        return parse_json(text, path)
    except ValueError:
        return text, []


def _write(raw: dict[str, Any], keys: list[str], value: Any) -> list[Fault]:
    section = raw
    for depth, key in enumerate(keys[:-1], start=1):
        inner = section.setdefault(key, {})
        if not isinstance(inner, dict):
            message = f"is not a section, so override {'.'.join(keys)} cannot be written into it"
            return [Fault(".".join(keys[:depth]), inner, message)]
        section = inner
    section[keys[-1]] = value
    return []
