"""Plays a run: starts its ranks, disturbs them where the scenario says so, and reads what they leave behind."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from faults.ranks import Ranks, start_ranks
from gauntlet.base import Changes, run_file
from gauntlet.scenario import Scenario
from gauntlet.worker import prepare, write_order

from megastable.core.run_paths import RunPaths

POLL_SECONDS = 0.02
MOST_RESUMES = 2


@dataclass
class Played:
    """What a run left behind."""

    exit_codes: list[list[int | None]]
    """Of the ranks, start by start."""
    events: list[dict[str, Any]]
    rows: list[dict[str, Any]]
    output: str
    seconds: float
    had_to_be_killed: int = 0

    @property
    def final_loss(self) -> float | None:
        """Return the validation loss at the end; None where the run did not come to it."""
        losses = [row["eval_loss"] for row in self.rows if row.get("eval_loss") is not None]
        return losses[-1] if losses and self.exit_codes[-1] == [0] * len(self.exit_codes[-1]) else None

    @property
    def first_exit_code(self) -> int | None:
        """Return the highest exit code of a rank of the first start; None where one had to be killed."""
        codes = self.exit_codes[0]
        return None if self.had_to_be_killed else max((code for code in codes if code is not None), key=abs)


@dataclass
class Start:
    """One start of a run."""

    changes: Changes
    scenario: str | None = None
    """Whose fault the ranks are given."""
    skip_step: bool = False
    flags: list[str] = field(default_factory=list)


class Player:
    """Plays runs in a folder, each within a time limit, and leaves no process."""

    def __init__(self, folder: Path, limit_seconds: float) -> None:
        self._folder = folder
        self._limit_seconds = limit_seconds

    def play(self, name: str, world_size: int, starts: list[Start], scenario: Scenario | None = None) -> Played:
        """Play a run of several starts.

        Args:
            name: of its folder.
            starts: the first, and those that follow while the run is not at its end.
            scenario: whose signal is sent to the first start; None for a run without a fault.
        """
        folder = self._folder / name
        run_dir = folder / "run"
        played = Played([], [], [], "", 0.0)
        began = time.monotonic()
        for number, start in enumerate(starts):
            file = run_file(folder / f"file_{number}", self._folder / "cache", start.changes)
            place = folder / f"start_{number}"
            write_order(place, start.scenario, start.skip_step)
            words = ["launch/train.py", "--deepspeed_config", str(file), "--run-dir", str(run_dir), "--resume=auto"]
            ranks = start_ranks([*words, *start.flags], world_size, place, prepare)
            try:
                if scenario is not None and scenario.signal is not None and number == 0:
                    self._signal(ranks, run_dir, scenario)
                ranks.wait(self._limit_seconds)
            finally:
                played.had_to_be_killed += ranks.end()
            played.exit_codes.append(ranks.exit_codes)
            played.output += ranks.output(most_characters=100_000)
        played.seconds = time.monotonic() - began
        paths = RunPaths(run_dir)
        played.events = read_lines(paths.events)
        played.rows = read_lines(paths.metrics)
        return played

    def _signal(self, ranks: Ranks, run_dir: Path, scenario: Scenario) -> None:
        """Send the scenario's signal to the last rank, once its step is done."""
        deadline = time.monotonic() + self._limit_seconds
        metrics = RunPaths(run_dir).metrics
        while len(read_lines(metrics)) < scenario.injected_step and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        pid = ranks.processes[-1].pid
        assert pid is not None and scenario.signal is not None
        os.kill(pid, scenario.signal)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read a file of JSON lines, and before it what the run has gone back from; none where it is missing."""
    superseded = path.with_suffix(".superseded.jsonl")
    found = []
    for file in (superseded, path):
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        # A line may just be on its way.
        found += [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    return found
