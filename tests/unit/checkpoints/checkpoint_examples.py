"""Small checkpoints, as a run of two stages writes them but for what the files hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megastable.checkpoints.folder import PARTIAL_SUFFIX, folder_name
from megastable.checkpoints.manifest import (
    FileRecord,
    LayoutRecord,
    Manifest,
    PieceRecord,
    StateRecord,
    TensorRecord,
    write_manifest,
)
from megastable.checkpoints.verify import file_checksum

FILES = {"rank_00000.safetensors": b"weights of stage 0", "rank_00001.safetensors": b"weights of stage 1"}


def make_checkpoint(checkpoints: Path, step: int, **changed: Any) -> Path:
    """Write a complete checkpoint as the engine does: aside, the manifest last, then renamed."""
    aside = make_partial(checkpoints, step, **changed)
    return aside.rename(checkpoints / folder_name(step))


def make_partial(checkpoints: Path, step: int, **changed: Any) -> Path:
    """Write a checkpoint that has all but its name."""
    aside = checkpoints / (folder_name(step) + PARTIAL_SUFFIX)
    aside.mkdir(parents=True)
    for name, content in FILES.items():
        # Of another step are other weights, of the same size.
        (aside / name).write_bytes(content + b"%20d" % step)
    write_manifest(manifest_of(step, aside, **changed), aside)
    return aside


def manifest_of(step: int, folder: Path, **changed: Any) -> Manifest:
    """Make the manifest that fits the files of ``folder``, with some of its values changed."""
    values = {
        "state": state_of(step),
        "layout": LayoutRecord(num_stages=2, data_parallel_size=1, tensor_parallel_size=1),
        "run": {"megastable": {"training": {"seed": 1}}},
        "corpus_fingerprint": "abc",
        "versions": {"torch": "2.13.0"},
        "monitors": {"loss_volatility": {"losses": [5.5, 5.25]}},
        "loss_scaler": {"cur_scale": 65536.0, "cur_iter": 10, "last_overflow_iter": -1, "cur_hysteresis": 2},
        "optimizer_steps": step,
        "loss": 5.25,
        "eval_loss": None,
        "files": {name: file_record(folder / name) for name in FILES},
        "tensors": TENSORS,
    }
    return Manifest(**{**values, **changed})


def state_of(step: int) -> StateRecord:
    """Count a run of 8 samples of 16 tokens a step."""
    samples = 8 * step
    return StateRecord(
        step=step, consumed_samples=samples, applied_samples=samples, consumed_tokens=16 * samples, skipped_steps=0
    )


def file_record(path: Path) -> FileRecord:
    """Record a file as it is."""
    return FileRecord(bytes=path.stat().st_size, checksum=file_checksum(path))


FIRST, SECOND = FILES
TENSORS = {
    "block_0.norm.weight": TensorRecord(
        shape=(4,), pieces=(PieceRecord(file=FIRST, dim=0, ranges=((0, 4),), start=0, stop=4),)
    ),
    # A fused projection of two tensor ranks, the first of whose shards lies in two files.
    "block_0.attention.input.weight": TensorRecord(
        shape=(6, 5),
        pieces=(
            PieceRecord(file=FIRST, dim=0, ranges=((0, 1), (2, 3), (4, 5)), start=0, stop=7),
            PieceRecord(file=SECOND, dim=0, ranges=((0, 1), (2, 3), (4, 5)), start=7, stop=15),
            PieceRecord(file=SECOND, dim=0, ranges=((1, 2), (3, 4), (5, 6)), start=0, stop=15),
        ),
    ),
}
