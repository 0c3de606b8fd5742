"""Writes and reads checkpoints of the pipeline engine, so that a broken write never looks like a checkpoint."""

from __future__ import annotations

import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch.distributed

from megastable.core.checkpoint_folder import (
    PARTIAL_SUFFIX,
    Manifest,
    file_sizes,
    flush_to_disk,
    folder_name,
    publish,
    read_manifest,
)
from megastable.core.records import TrainingState
from megastable.engine.random_state import load_random_state, save_random_state
from megastable.engine.training_engine import TrainingEngine

RECORDED_PACKAGES = ("megastable", "torch", "deepspeed")


def save_checkpoint(
    engine: TrainingEngine,
    checkpoints: Path,
    state: TrainingState,
    run: dict[str, Any],
    corpus_fingerprint: str,
    monitors: dict[str, Any] | None = None,
) -> Path:
    """Write weights, optimizer, loss scaler, random states and ``state`` below ``checkpoints``; collective.

    The files go to a ``.partial`` folder; once all ranks are done rank 0 writes the manifest and renames it.

    Args:
        run: the run file as a dictionary, kept in the manifest as are the next two.
        corpus_fingerprint: identifies the tokenised data.
        monitors: the state of the monitors.

    Returns:
        The published folder.
    """
    rank = torch.distributed.get_rank()
    world_size = torch.distributed.get_world_size()
    final = checkpoints / folder_name(state.step)
    partial = final.with_name(final.name + PARTIAL_SUFFIX)
    if rank == 0:
        shutil.rmtree(partial, ignore_errors=True)  # left by a run that was killed here
        partial.mkdir(parents=True)
    torch.distributed.barrier()
    # DeepSpeed's own marker, a file named latest, would be written before all ranks are done, and name this folder.
    engine.deepspeed.save_checkpoint(str(checkpoints), tag=partial.name, save_latest=False)
    save_random_state(partial, rank)
    torch.distributed.barrier()
    if torch.distributed.get_node_local_rank() == 0:
        flush_to_disk(*partial.rglob("*"))  # what this node has written
    torch.distributed.barrier()
    if rank == 0:
        versions = {package: version(package) for package in RECORDED_PACKAGES}
        manifest = Manifest(
            state.to_dict(), run, corpus_fingerprint, world_size, versions, file_sizes(partial), monitors or {}
        )
        manifest.write(partial)
        publish(partial, final)
    torch.distributed.barrier()
    return final


def load_checkpoint(engine: TrainingEngine, folder: Path) -> TrainingState:
    """Read a checkpoint of the same layout into ``engine``; collective. The run file's own settings stay in force.

    Raises:
        UserError: the checkpoint is not complete.
    """
    manifest = read_manifest(folder)
    # No LR scheduler is handed to DeepSpeed: the learning rate is a function of ``state``.
    path, _ = engine.deepspeed.load_checkpoint(str(folder.parent), tag=folder.name, load_lr_scheduler_states=False)
    if path is None:
        raise RuntimeError(f"DeepSpeed found no checkpoint in {folder}")
    engine.configured_optimizer.put_back()
    load_random_state(folder, torch.distributed.get_rank())
    return TrainingState.from_dict(manifest.state)
