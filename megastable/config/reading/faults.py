"""What is wrong with a run file, as one error that lists every fault."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from megastable.core.errors import UserError

LONGEST_SHOWN_VALUE: Final = 60


class NoValue(Enum):
    """Stands where a fault has no value to show; ``None`` is a value (JSON's null)."""

    NO_VALUE = "no value"


NO_VALUE: Final = NoValue.NO_VALUE


@dataclass(frozen=True)
class Fault:
    """One fault: the dotted path of the key ("" for the file itself), the value it has, and what is legal."""

    path: str
    value: object
    message: str

    def __str__(self) -> str:
        if not self.path:
            return self.message
        shown = "" if self.value is NO_VALUE else f" = {short_json(self.value)}"
        return f"{self.path}{shown}: {self.message}"


class ConfigError(UserError):
    """A run file with faults. ``str()`` names the file and lists all of them, one a line."""

    def __init__(self, source: str, faults: Sequence[Fault]) -> None:
        super().__init__(source, faults)
        self.source = source
        self.faults = tuple(faults)

    def __str__(self) -> str:
        count = len(self.faults)
        lines = [f"{self.source}: {count} fault{'s' if count != 1 else ''}", *map(str, self.faults)]
        return "\n  ".join(lines)


class UnreadableRunFileError(ConfigError):
    """There is no run file to check: it is not there, not text, or not a JSON object."""


def short_json(value: object) -> str:
    """The value as the file has it, cut where it is long."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= LONGEST_SHOWN_VALUE else text[: LONGEST_SHOWN_VALUE - 3] + "..."
