"""A checkpoint of ours as the model that it holds: its settings, and its whole tensors one at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megastable.checkpoints.folder import complete_manifest, newest_complete
from megastable.checkpoints.listing import paths_to_look_at
from megastable.checkpoints.manifest import Manifest
from megastable.checkpoints.verify import verify
from megastable.config import ConfigError, ModelConfig, RunConfig, run_from_dict
from megastable.core.errors import UserError
from megastable.core.pieces import Piece, Shard
from megastable.core.run_paths import RunPaths
from megastable.engine.checkpoint_tensors import MASTER, read_piece
from megastable.interop.progress import Progress


@dataclass(frozen=True)
class SavedModel:
    """The model of a complete checkpoint, of any layout."""

    checkpoint: Path
    manifest: Manifest
    run: RunConfig

    @property
    def model(self) -> ModelConfig:
        """Return the model's section of the run file."""
        return self.run.megastable.model

    def tensor(self, name: str) -> Tensor:
        """Read one whole fp32 tensor, without what pads a vocabulary.

        Raises:
            UserError: the checkpoint does not have it, or a file cannot be read.
        """
        record = self.manifest.tensors.get(name)
        if record is None:
            raise UserError(f"{self.checkpoint} has no tensor {name}, which its model needs")
        whole = Shard.whole(record.shape)
        tensor = torch.empty(record.shape)
        read_piece(self.checkpoint, self.manifest, name, Piece.all_of(whole), {MASTER: tensor.view(-1)})
        return tensor


def open_saved_model(path: Path, warn: Callable[[str], None]) -> SavedModel:
    """Open a checkpoint, or the newest complete one of a run folder.

    Args:
        warn: is told of newer ones that are passed over.

    Raises:
        UserError: ``path`` is neither, there is none, or its run file is not one that this program reads.
    """
    checkpoint = _checkpoint_at(path, warn)
    manifest = complete_manifest(checkpoint)
    try:
        run = run_from_dict(manifest.run, source=f"the run file in {checkpoint}")
    except ConfigError as error:
        raise UserError(f"{checkpoint} was written by another version of megastable:\n{error}") from error
    return SavedModel(checkpoint, manifest, run)


def _checkpoint_at(path: Path, warn: Callable[[str], None]) -> Path:
    if paths_to_look_at(path) == [path]:
        return path
    checkpoints = RunPaths(path).checkpoints
    found = newest_complete(checkpoints if checkpoints.is_dir() else path, warn)
    if found is None:
        raise UserError(
            f"{path} has no complete checkpoint; a run saves one after its last step, and every "
            "megastable.checkpoint.save_interval steps"
        )
    return found


def check_whole(saved: SavedModel, progress: Progress) -> None:
    """Compare every byte of the checkpoint with the checksums of its writing.

    Raises:
        UserError: they differ; the file is named.
    """
    total = sum(record.bytes for record in saved.manifest.files.values())
    faults = verify(saved.checkpoint, progress.begin("verifying the checkpoint", total))
    if faults:
        raise UserError("\n".join(faults))
