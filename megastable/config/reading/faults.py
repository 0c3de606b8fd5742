"""What is wrong with a run file: a fault for every breach, and one error that lists them all."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from megastable.core.errors import UserError, shown

LONGEST_SHOWN_VALUE: Final = 60


class NoValue(Enum):
    """Stands where a fault has no value to show; ``None`` is a value (JSON's null)."""

    NO_VALUE = "no value"


NO_VALUE: Final = NoValue.NO_VALUE


@dataclass(frozen=True)
class Fault:
    """Names the dotted path of a key ("" for the file itself), the value it has, and what is legal."""

    path: str
    value: object
    message: str

    def __str__(self) -> str:
        text = self.message
        if self.path:
            value = "" if self.value is NO_VALUE else f" = {short_json(self.value)}"
            text = f"{self.path}{value}: {self.message}"
        # A fault is one line, whatever stands in the file.
        return shown(text)


class ConfigError(UserError):
    """Refuses a run file that has faults. ``str()`` names the file and lists all of them, one a line."""

    def __init__(self, source: str, faults: Sequence[Fault]) -> None:
        # The arguments, not the text: an error that travels between processes is made again from them.
        super().__init__(source, faults)
        self.source = source
        self.faults = tuple(faults)

    def __str__(self) -> str:
        count = len(self.faults)
        plural = "s" if count != 1 else ""
        return "\n  ".join([f"{shown(self.source)}: {count} fault{plural}", *map(str, self.faults)])


class UnreadableRunFileError(ConfigError):
    """Refuses what cannot be checked at all: the file does not exist, is not text, or is not a JSON object."""


def short_json(value: object) -> str:
    """Write the value as the file has it, cut where it is long."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= LONGEST_SHOWN_VALUE else text[: LONGEST_SHOWN_VALUE - 3] + "..."
