"""Functions of DeepSpeed and torch by their names, and the record of where megastable departs from them."""

from __future__ import annotations

import hashlib
import inspect
import pkgutil
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Departure:
    """One thing that megastable does differently.

    Attributes:
        name: what is done, and the module of this room that does it.
        scope: what is changed: one engine, its optimizer, its pipeline module, or the whole process.
        symptom: what goes wrong without it.
        cause: why it does.
        upstream: names of the original functions, as ``module:qualified.name``, with the hashes of their source; empty
            where the original is not Python.
        test: node id of the test that fails without it, parameters left out.
    """

    name: str
    scope: Literal["engine", "optimizer", "module", "process"]
    symptom: str
    cause: str
    upstream: dict[str, str]
    test: str


def source_hash(name: str) -> str:
    """Hash the source of the function, property or class of this name, its indentation and surrounding space apart."""
    source = textwrap.dedent(inspect.getsource(_resolved(name))).strip()
    return hashlib.sha256(source.encode()).hexdigest()[:12]


def changes(departure: Departure) -> Iterator[str]:
    """Yield a message for every function upstream whose source is not the recorded one: what to read, and why."""
    for name, recorded in departure.upstream.items():
        try:
            now = source_hash(name)
            where = f"in {inspect.getsourcefile(_resolved(name))}"
        except (ImportError, AttributeError):
            now = "gone"
            where = "is not there any more"
        if now != recorded:
            yield (
                f"{name} {where} has the hash {now}, recorded is {recorded or 'none'}. Read it again for the departure "
                f"{departure.name!r}, without which {departure.symptom}."
            )


def _resolved(name: str) -> Any:
    found = pkgutil.resolve_name(name)
    return found.fget if isinstance(found, property) else found
