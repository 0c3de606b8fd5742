"""Complete checkpoints without weights, for tests of where a run goes on from and whether it may."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from megastable.checkpoints.manifest import LayoutRecord, Manifest, StateRecord, write_manifest
from megastable.config import RunConfig
from megastable.config.run_config import run_as_dict
from megastable.core.layout import ParallelLayout
from megastable.core.records import TrainingState

ONE_PROCESS = ParallelLayout(1, 1, 1)


def manifest_of(run: RunConfig, state: TrainingState, layout: ParallelLayout = ONE_PROCESS, **changed: Any) -> Manifest:
    """Make the manifest of a checkpoint of ``run``, with some of its values changed."""
    values: dict[str, Any] = {
        "state": StateRecord.of(state),
        "layout": LayoutRecord(**asdict(layout)),
        "run": run_as_dict(run),
        "corpus_fingerprint": "tokens",
        "versions": {},
        "monitors": {},
        "loss_scaler": None,
        "optimizer_steps": state.step - state.skipped_steps,
        "loss": None,
        "eval_loss": None,
        "files": {},
        "tensors": {},
    }
    return Manifest(**{**values, **changed})


def write_checkpoint(
    folder: Path, run: RunConfig, state: TrainingState, layout: ParallelLayout = ONE_PROCESS, **changed: Any
) -> Path:
    """Write such a checkpoint, whose folder is ``folder``."""
    folder.mkdir(parents=True)
    write_manifest(manifest_of(run, state, layout, **changed), folder)
    return folder
