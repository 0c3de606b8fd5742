"""Reading a config.json of `transformers`: every method names the key that it refuses, its value and what is legal."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megastable.core.errors import UserError


@dataclass(frozen=True)
class ReadModel:
    """The model section that a config.json asks for, and what of the file it leaves out, one sentence each."""

    section: dict[str, Any]
    remarks: tuple[str, ...] = ()


class NotExpressibleError(UserError):
    """A config.json asks for what our model cannot compute."""


@dataclass(frozen=True)
class TheirConfig:
    """A config.json under reading, which remembers no state: every method names the key that it refuses."""

    values: Mapping[str, Any] = field(default_factory=dict)

    def size(self, *names: str, default: int | None = None) -> int:
        """Return a whole number from 1, under the first of its ``names`` that is there."""
        name, value = self._first(names, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise _refused(name, value, "must be a whole number from 1")
        return value

    def number(self, *names: str, default: float | None = None) -> float:
        """Return a finite number, under the first of its ``names`` that is there."""
        name, value = self._first(names, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise _refused(name, value, "must be a finite number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """Return true or false."""
        value = self.values.get(name, default)
        if not isinstance(value, bool):
            raise _refused(name, value, "must be true or false")
        return value

    def chosen(self, name: str, choices: Mapping[str, str], default: str) -> str:
        """Return our name of the value, which has to be among the ``choices``."""
        value = self.values.get(name, default)
        if not isinstance(value, str) or value not in choices:
            raise _refused(name, value, f"must be {' or '.join(choices)}; nothing else is built here")
        return choices[value]

    def must_be(self, name: str, expected: Any) -> None:
        """Refuse any value but ``expected``, which is what the class takes a missing key for."""
        value = self.values.get(name, expected)
        if value != expected:
            raise _refused(name, value, f"must be {json.dumps(expected)}; nothing else is built here")

    def one_dropout(self, *names: str, default: float) -> tuple[float, tuple[str, ...]]:
        """Return the one share of values that all of ``names`` drop, with a remark where there is no such share."""
        shares = {name: self.number(name, default=default) for name in names}
        if len(set(shares.values())) == 1:
            return shares[names[0]], ()
        listed = ", ".join(f"{name} {share}" for name, share in shares.items())
        return 0.0, (f"dropout is one number here, and config.json has several ({listed}): it is off",)

    def rotary(self, fraction: float) -> tuple[float, float]:
        """Return base and share of the turned channels; refuse angles that are scaled.

        Args:
            fraction: of a config.json that gives none.
        """
        # transformers 5 has one object, the versions before it a key for each value.
        given = self.values.get("rope_parameters") or self.values.get("rope_scaling") or {}
        if not isinstance(given, Mapping):
            raise _refused("rope_parameters", given, "must be an object")
        kind = given.get("rope_type", given.get("type", "default"))
        if kind != "default":
            raise _refused("rope_parameters.rope_type", kind, "must be default; scaled angles are not built here")
        parameters = TheirConfig({**self.values, **given})
        base = parameters.number("rope_theta", "rotary_emb_base", default=10000.0)
        return base, parameters.number("partial_rotary_factor", "rotary_pct", default=fraction)

    def _first(self, names: tuple[str, ...], default: Any) -> tuple[str, Any]:
        for name in names:
            if self.values.get(name) is not None:
                return name, self.values[name]
        if default is None:
            raise NotExpressibleError(f"config.json: {names[0]} is missing")
        return names[0], default


def _refused(name: str, value: Any, legal: str) -> NotExpressibleError:
    return NotExpressibleError(f"config.json: {name} is {value!r}: {legal}")


ACTIVATIONS: Mapping[str, str] = {
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_fast": "gelu",
    "gelu": "gelu_exact",
}
"""Their name of an activation -> ours; the first of each is the one that is written."""


def their_activation(ours: str) -> str:
    """Return the name in config.json of one of our activations."""
    return next(theirs for theirs, name in ACTIVATIONS.items() if name == ours)
