"""Values that name an entry of a registry."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic_core import PydanticCustomError


def must_be_registered(name: str, registry: Iterable[str]) -> str:
    """Return ``name``; raises the field's error, which lists the legal names, when ``registry`` lacks it."""
    names = list(registry)
    if name not in names:
        legal = ", ".join(repr(legal) for legal in names)
        raise PydanticCustomError("not_registered", "must be one of {legal}", {"legal": legal})
    return name
