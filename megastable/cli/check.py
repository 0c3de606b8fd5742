"""Findings on a run file, for people and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.text import Text

from megastable.cli.tables import as_json
from megastable.core.errors import shown
from megastable.planning.preflight.review import LEVELS, Finding

STYLES = {"error": "bold red", "warning": "yellow", "note": "cyan"}


def print_findings(findings: Sequence[Finding], name: str, json_wanted: bool) -> None:
    """Print every finding in three lines and how many there are of each level, or all of them as a list of objects."""
    if json_wanted:
        print(as_json([asdict(finding) for finding in findings]))
        return
    # Soft wrapping leaves a long message on one line, so that the output can be searched line by line.
    console = Console(highlight=False, soft_wrap=True)
    for finding in findings:
        console.print(Text.assemble((finding.level, STYLES[finding.level]), " ", (shown(finding.key), "bold")))
        # As Text: a message may hold [brackets], which a plain string would turn into markup.
        console.print(Text(f"  {shown(finding.message)}"))
        console.print(Text(f"  instead: {shown(finding.suggestion)}"))
    console.print(Text(f"{shown(name)}: {summary(findings)}"))


def summary(findings: Sequence[Finding]) -> str:
    """Say in words how many findings of each level there are."""
    counts = Counter(finding.level for finding in findings)
    parts = []
    for level in LEVELS:
        if counts[level] == 1:
            parts.append(f"1 {level}")
        elif counts[level] > 1:
            parts.append(f"{counts[level]} {level}s")
    return ", ".join(parts) or "nothing to say"
