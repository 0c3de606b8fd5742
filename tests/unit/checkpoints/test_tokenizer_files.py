"""The tokenizer of a checkpoint: which files travel, whole or named as damaged."""

from __future__ import annotations

from pathlib import Path

from megastable.checkpoints.manifest import read_manifest, write_manifest
from megastable.checkpoints.tokenizer_files import read_tokenizer_files, tokenizer_of, write_tokenizer_files
from megastable.checkpoints.verify import verify
from megastable.core.records import TrainingState
from tests.support.checkpoints import manifest_of
from tests.support.tiny_run import tiny_run

FILES = {"tokenizer.json": b'{"a": 1}', "merges.txt": b"", "spm.model": bytes(range(256))}


def checkpoint_with_tokenizer(folder: Path) -> Path:
    """Write a checkpoint without weights whose tokenizer has three files."""
    checkpoint = folder / "step_00000003"
    checkpoint.mkdir()
    records = write_tokenizer_files(checkpoint, FILES)
    write_manifest(manifest_of(tiny_run(), TrainingState(step=3), files=records), checkpoint)
    return checkpoint


def test_the_files_come_back_and_are_whole(tmp_path: Path) -> None:
    checkpoint = checkpoint_with_tokenizer(tmp_path)
    assert tokenizer_of(checkpoint, read_manifest(checkpoint)) == FILES
    assert verify(checkpoint) == []


def test_a_file_that_has_changed_is_named(tmp_path: Path) -> None:
    checkpoint = checkpoint_with_tokenizer(tmp_path)
    (checkpoint / "tokenizer.json").write_bytes(b'{"a": 2}')
    (fault,) = verify(checkpoint)
    assert "tokenizer.json has the checksum" in fault
    (checkpoint / "spm.model").unlink()
    assert any("spm.model is missing" in fault for fault in verify(checkpoint))


def test_what_is_no_part_of_a_tokenizer_stays_behind(tmp_path: Path) -> None:
    for name in ("tokenizer.json", ".hidden", "odd name", "model.safetensors", "manifest.json"):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "folder").mkdir()
    assert read_tokenizer_files(tmp_path) == {"tokenizer.json": b"x"}
    assert read_tokenizer_files(tmp_path / "missing") == {}


def test_a_checkpoint_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    assert tokenizer_of(tmp_path, manifest_of(tiny_run(), TrainingState(step=3))) == {}
