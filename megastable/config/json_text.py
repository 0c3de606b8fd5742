"""Reading JSON so that no key is lost: the standard parser silently keeps the last of two equal keys."""

from __future__ import annotations

import json
from typing import Any

from megastable.config.faults import Fault


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
