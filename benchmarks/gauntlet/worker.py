"""What every rank of a played run calls before the trainer starts: it installs the fault, and OLMo-core's rule."""

from __future__ import annotations

import json
from pathlib import Path


def write_order(place: Path, scenario: str | None, skip_step: bool) -> None:
    """Leave word for the ranks whose folder will be ``place``."""
    _order(place).write_text(json.dumps({"scenario": scenario, "skip_step": skip_step}), encoding="utf-8")


def prepare(record: Path) -> None:
    """Do what was left word of for the ranks that are to record beside ``record``."""
    from gauntlet.live import install
    from gauntlet.scenarios import SCENARIOS
    from gauntlet.skip_step import install_skip_step

    order = json.loads(_order(record.parent).read_text(encoding="utf-8"))
    if order["skip_step"]:
        install_skip_step()
    if order["scenario"] is not None:
        inject = SCENARIOS[order["scenario"]].inject
        if inject is not None:
            install(inject)


def _order(place: Path) -> Path:
    return place.with_suffix(".order.json")
