"""Writes scores as a table in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

HEAD = (
    "| scenario | injected | detected | culprit | recovered | final loss | clean run | no guard | OLMo-core's rule |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table of the scenarios, and a line that sums them up."""
    lines = [HEAD, *map(_row, rows)]
    passed = sum(bool(row["passed"]) for row in rows)
    lines += ["", f"{passed} of {len(rows)} scenarios: detected, the culprit named, and recovered where that can be."]
    return "\n".join(lines) + "\n"


def _row(row: dict[str, Any]) -> str:
    detected = row["detected_step"]
    after = "**no**" if detected is None else _after(detected - row["injected_step"], row["injected_step"])
    recovered = {None: "by the user", True: "yes", False: "**no**"}[row["recovered"]]
    cells = [
        row["fault"],
        str(row["injected_step"]) if row["injected_step"] else "run file",
        after,
        "named" if row["culprit_named"] else "**not named**",
        recovered,
        _loss(row["final_loss"]),
        _loss(row["clean_final_loss"]),
        _compared(row, "unguarded_final_loss"),
        _compared(row, "skip_step_final_loss"),
    ]
    return f"| {' | '.join(cells)} |"


def _after(steps: int, injected_step: int) -> str:
    if injected_step == 0:
        return "before step 1" if steps == 0 else f"step {steps}"
    return "at once" if steps == 0 else f"{steps} steps later"


def _loss(loss: float | None) -> str:
    return "ended before" if loss is None else f"{loss:.4f}"


def _compared(row: dict[str, Any], key: str) -> str:
    return _loss(row[key]) if row["compared"] else "-"


def clean_markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table of the clean runs, with every false alarm."""
    lines = ["| clean run | steps | final loss | false alarms |", "|---|---|---|---|"]
    for row in rows:
        alarms = "; ".join(row["false_alarms"]) or "none"
        lines.append(f"| {row['name']} | {row['steps']} | {_loss(row['final_loss'])} | {alarms} |")
    total = sum(len(row["false_alarms"]) for row in rows)
    return "\n".join([*lines, "", f"{total} false alarms in {len(rows)} clean runs."]) + "\n"
