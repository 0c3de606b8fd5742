"""One thing that a reviewer has to say about a run file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from megastable.config import Fault
from megastable.config.faults import NO_VALUE, short_json

Level = Literal["error", "warning", "note"]
LEVELS: tuple[Level, ...] = get_args(Level)
"""Gravest first. error: refused, or unsafe. warning: the run will likely suffer. note: unusual, or good to know."""


@dataclass(frozen=True)
class Finding:
    """What is wrong with which key, why (with the number), and what to write instead."""

    level: Level
    key: str
    message: str
    suggestion: str

    @classmethod
    def of_fault(cls, fault: Fault) -> Finding:
        """A fault for which the file is refused. Its message ends in what is legal, mostly after a semicolon."""
        why, _, legal = fault.message.rpartition("; ")
        key = fault.path or "world_size"  # a fault of no key is one of the layout
        if fault.value is NO_VALUE:
            instead = "add it" if fault.path else "change one of them"
            return cls("error", key, why or fault.message, legal if why else instead)
        shown = f"is {short_json(fault.value)}"
        return cls("error", key, f"{shown}: {why}" if why else shown, legal)
