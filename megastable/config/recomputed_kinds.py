"""Which parts of a block are recomputed: true, false, or a list of kinds."""

from __future__ import annotations

import json
from typing import Annotated

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from megastable.core.recomputation import HALVES, RECOMPUTED_KINDS

EXCLUSIVE = [kind for kind in RECOMPUTED_KINDS if kind not in HALVES]


def _kinds_fit_together(value: object) -> object:
    if isinstance(value, bool):
        return value
    if isinstance(value, list | tuple) and all(isinstance(kind, str) for kind in value):
        together = len(value) == len(set(value)) and set(value) <= set(HALVES)
        if value and (together or list(value) in [[kind] for kind in EXCLUSIVE]):
            return tuple(value)
    lists = " or ".join(json.dumps(kinds) for kinds in [*([kind] for kind in EXCLUSIVE), list(HALVES)])
    raise PydanticCustomError(
        "recomputed_kinds", "must be true, false or a list: {lists}, or one of the latter", {"lists": lists}
    )


_Kind = Annotated[str, Field(json_schema_extra={"enum": list(RECOMPUTED_KINDS)})]
RecomputedKinds = Annotated[
    bool | tuple[str, ...],
    BeforeValidator(_kinds_fit_together, json_schema_input_type=bool | Annotated[list[_Kind], Field(min_length=1)]),
]
"""The type of the key."""
