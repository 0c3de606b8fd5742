"""Overrides of single keys, ``path.to.key=value``, as the command line gives them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megastable.config.faults import NO_VALUE, Fault
from megastable.config.json_text import parse_json


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
