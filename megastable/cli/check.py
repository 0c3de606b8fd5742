"""Findings on a run file, for people and as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.text import Text

from megastable.planning.preflight.review import LEVELS, Finding

STYLES = {"error": "bold red", "warning": "yellow", "note": "cyan"}


def as_json(findings: Sequence[Finding]) -> str:
    """A list of objects with ``level``, ``key``, ``message`` and ``suggestion``."""
    return json.dumps([asdict(finding) for finding in findings], indent=2, ensure_ascii=False)


def show(findings: Sequence[Finding], name: str) -> None:
    """Print every finding in two lines, and how many there are of each level."""
    console = Console(highlight=False, soft_wrap=True)
    for finding in findings:
        console.print(Text.assemble((finding.level, STYLES[finding.level]), " ", (finding.key, "bold")))
        console.print(Text(f"  {finding.message}"))
        console.print(Text(f"  instead: {finding.suggestion}"))
    console.print(Text(f"{name}: {summary(findings)}"))


def summary(findings: Sequence[Finding]) -> str:
    """How many findings of each level, in words."""
    counts = Counter(finding.level for finding in findings)
    parts = [f"{counts[level]} {level}{'s' if counts[level] > 1 else ''}" for level in LEVELS if counts[level]]
    return ", ".join(parts) or "nothing to say"
