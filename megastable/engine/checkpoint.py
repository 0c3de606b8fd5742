"""What a rank writes into a checkpoint and reads from one: its pieces of named, whole tensors, in any layout.

A checkpoint says what the model is and not how it was cut. Every element of the masters and moments is written once,
by the rank that counts it; every rank reads what its own pieces have in common with those that were written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megastable.checkpoints.folder import complete_manifest, newest_complete
from megastable.checkpoints.manifest import (
    FileRecord,
    LayoutRecord,
    Manifest,
    PieceRecord,
    ScalerRecord,
    StateRecord,
    TensorRecord,
    recorded_versions,
)
from megastable.checkpoints.verify import faults_of_file
from megastable.core.errors import UserError
from megastable.core.layout import ParallelLayout
from megastable.core.pieces import Piece
from megastable.core.records import TrainingState
from megastable.engine.checkpoint_tensors import KINDS, file_name, opened, read_piece, tensor_key
from megastable.engine.flat_partitions import FlatPartition, HeldParameter
from megastable.engine.model_state import ModelState, Snapshot
from megastable.engine.random_state import is_random_state, seed_rank, set_random_state
from megastable.engine.tensor_file import write_tensors

RANDOM = "random"


@dataclass(frozen=True)
class RunRecord:
    """What a checkpoint holds beside the tensors."""

    state: TrainingState
    run: dict[str, Any]
    """The run file as a dictionary."""
    corpus_fingerprint: str
    """Identifies the tokenised data."""
    monitors: dict[str, Any]
    loss: float | None
    eval_loss: float | None
    tokenizer: Mapping[str, bytes] = field(default_factory=dict)
    """The files of the tokenizer, by their names: a model is no use without it."""


@dataclass(frozen=True)
class RankRecord:
    """What one rank wrote, for the manifest."""

    file_name: str
    file: FileRecord
    tensors: dict[str, tuple[tuple[int, ...], PieceRecord]]
    """Name to the shape of the whole tensor and the piece of it in the file."""


def num_state_bytes(partitions: list[FlatPartition]) -> int:
    """Return the bytes of the tensors that this rank writes, random generators aside."""
    elements = sum(held.piece.num_elements for partition in partitions for held in _written(partition))
    return len(KINDS) * torch.float32.itemsize * elements


def write_pieces(folder: Path, rank: int, partitions: list[FlatPartition], snapshot: Snapshot) -> RankRecord:
    """Write what ``snapshot`` holds of this rank's pieces, and its random state, into one file.

    Raises:
        OSError: the file cannot be written.
    """
    name = file_name(rank)
    tensors: dict[str, Tensor] = {}
    pieces: dict[str, tuple[tuple[int, ...], PieceRecord]] = {}
    for partition, flats in zip(partitions, snapshot.flats, strict=True):
        for held in _written(partition):
            for kind in KINDS:
                tensors[tensor_key(kind, held.name)] = flats[kind][slice(*held.piece_span)]
            pieces[held.name] = (held.shard.full_shape, _piece_record(name, held.piece))
    tensors |= {tensor_key(RANDOM, generator): state for generator, state in snapshot.random.items()}
    return RankRecord(name, write_tensors(folder / name, tensors), pieces)


def _written(partition: FlatPartition) -> list[HeldParameter]:
    # A piece that is all padding is nothing.
    return [held for held in partition.held if held.is_counted and held.piece.num_elements > 0]


def _piece_record(name: str, piece: Piece) -> PieceRecord:
    return PieceRecord(file=name, dim=piece.shard.dim, ranges=piece.shard.ranges, start=piece.start, stop=piece.stop)


def make_manifest(
    record: RunRecord,
    layout: ParallelLayout,
    snapshot: Snapshot,
    ranks: list[RankRecord],
    tokenizer: Mapping[str, FileRecord],
) -> Manifest:
    """Describe the checkpoint that all ranks together have written.

    Args:
        snapshot: that of any rank; its counts are the same on every one.
        tokenizer: its files.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    pieces: dict[str, list[PieceRecord]] = {}
    for rank in ranks:
        for name, (shape, piece) in rank.tensors.items():
            shapes[name] = shape
            pieces.setdefault(name, []).append(piece)
    return Manifest(
        state=StateRecord.of(record.state),
        layout=LayoutRecord(
            num_stages=layout.num_stages,
            data_parallel_size=layout.data_parallel_size,
            tensor_parallel_size=layout.tensor_parallel_size,
        ),
        run=record.run,
        corpus_fingerprint=record.corpus_fingerprint,
        versions=recorded_versions(),
        monitors=record.monitors,
        loss_scaler=None if snapshot.loss_scaler is None else ScalerRecord(**snapshot.loss_scaler),
        optimizer_steps=snapshot.optimizer_steps,
        loss=record.loss,
        eval_loss=record.eval_loss,
        files={**{rank.file_name: rank.file for rank in ranks}, **tokenizer},
        tensors={name: TensorRecord(shape=shapes[name], pieces=tuple(pieces[name])) for name in pieces},
    )


def shared_faults(folder: Path, manifest: Manifest) -> list[str]:
    """Compare the files of a checkpoint with their checksums, each on one rank, and list what is wrong; collective."""
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    own = [
        faults_of_file(folder, name, record)
        for number, (name, record) in enumerate(sorted(manifest.files.items()))
        if number % world_size == rank
    ]
    everywhere: list[list[str | None]] = [[]] * world_size
    dist.all_gather_object(everywhere, own)
    return [fault for faults in everywhere for fault in faults if fault is not None]


def load_newest(
    checkpoints: Path,
    before_step: int,
    state: ModelState,
    layout: ParallelLayout,
    seed: int,
    warn: Callable[[str], None],
    why_not: Callable[[Manifest], str | None],
) -> Manifest | None:
    """Load the newest whole checkpoint of a lower step than ``before_step``, and return its manifest. Collective.

    Args:
        warn: is told of those that are passed over.
        why_not: says why the run cannot go on from a checkpoint, the same on every rank; None where it can.

    Returns:
        None where there is none.
    """
    passed_over: list[Path] = []
    while True:
        folder = _chosen_by_rank_0(checkpoints, before_step, passed_over, warn)
        if folder is None:
            return None
        manifest = complete_manifest(folder)
        fault = why_not(manifest)
        if fault is None:
            fault = ", ".join(shared_faults(folder, manifest))
            if not fault:
                load_checkpoint(folder, manifest, state, layout, seed)
                return manifest
            fault = f"is damaged: {fault}"
        warn(f"{folder} {fault}; falling back to an older checkpoint")
        passed_over.append(folder)


def _chosen_by_rank_0(
    checkpoints: Path, before_step: int, passed_over: Sequence[Path], warn: Callable[[str], None]
) -> Path | None:
    # A node may see the files of a shared folder late, and would choose another one.
    chosen: list[str | None] = [None]
    if dist.get_rank() == 0:
        folder = newest_complete(checkpoints, warn, before_step, passed_over, sane_loss=True)
        chosen[0] = None if folder is None else folder.name
    dist.broadcast_object_list(chosen, src=0)
    return None if chosen[0] is None else checkpoints / chosen[0]


def load_checkpoint(
    folder: Path, manifest: Manifest, state: ModelState, layout: ParallelLayout, seed: int
) -> TrainingState:
    """Read a checkpoint of any layout into this rank's state; collective. The run file's own settings stay in force.

    Args:
        seed: of the run, for the random generators of a layout whose streams the checkpoint does not have.

    Raises:
        UserError: the checkpoint is of another model, or a file of it cannot be read.
    """
    for flats in state.flats():
        for flat in flats.values():
            flat.zero_()  # what pads a vocabulary or a share stands in no checkpoint
    _raise_together(lambda: _read_all(folder, manifest, state))
    scaler = manifest.loss_scaler
    state.set_counts(manifest.optimizer_steps, None if scaler is None else scaler.model_dump())
    state.weights_follow_masters()
    reached = manifest.state.to_training_state()
    _restore_random(folder, manifest, layout, partial(seed_rank, seed, step=reached.step))
    return reached


def _read_all(folder: Path, manifest: Manifest, state: ModelState) -> None:
    for partition, flats in zip(state.partitions, state.flats(), strict=True):
        for held in partition.held:
            piece_of_flats = {kind: flat[slice(*held.piece_span)] for kind, flat in flats.items()}
            read_piece(folder, manifest, held.name, held.piece, piece_of_flats)


def _raise_together(read: Callable[[], None]) -> None:
    """Let every rank read, and then all of them meet what one of them has found; collective.

    Raises:
        UserError: the first rank's that has one, on every rank.
    """
    own: str | None = None
    try:
        read()
    except UserError as error:
        own = str(error)
    faults: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(faults, own)
    for fault in faults:
        if fault is not None:
            raise UserError(fault)


def _restore_random(folder: Path, manifest: Manifest, layout: ParallelLayout, reseed: Callable[..., None]) -> None:
    rank = dist.get_rank()
    written = manifest.layout
    then = ParallelLayout(written.num_stages, written.data_parallel_size, written.tensor_parallel_size)
    if then == layout:
        prefix = tensor_key(RANDOM, "")
        with opened(folder / file_name(rank)) as file:
            names = [key for key in file.keys() if key.startswith(prefix)]  # noqa: SIM118 - it is no dictionary
            state = {name.removeprefix(prefix): file.get_tensor(name) for name in names}
            if is_random_state(state):
                set_random_state(state)
                return
    # The streams belong to stages and replicas that are not there any more, or to another kind of device.
    stage, replica, tensor = layout.coordinates(rank)
    reseed(stage=stage, replica=replica, tensor=tensor)
