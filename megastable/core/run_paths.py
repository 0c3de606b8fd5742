"""The names of the files in a run's folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunPaths:
    """Names what a run writes into its folder ``path``: the writer and the readers spell it here."""

    path: Path

    @property
    def config(self) -> Path:
        """Return the run file with its defaults filled in and every ``--set`` applied."""
        return self.path / "config.json"

    @property
    def metrics(self) -> Path:
        """Return the file with one JSON object for every step that was recorded."""
        return self.path / "metrics.jsonl"

    @property
    def events(self) -> Path:
        """Return the file with one JSON object for every event of a monitor."""
        return self.path / "events.jsonl"

    @property
    def checkpoints(self) -> Path:
        """Return the folder of the checkpoints, see ``core.checkpoint_folder``."""
        return self.path / "checkpoints"
