"""A byte that has changed is found in whatever file it lies."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_128_hexdigest

from megastable.checkpoints.manifest import MANIFEST_NAME
from megastable.checkpoints.verify import CHUNK_BYTES, file_checksum, verify
from tests.unit.checkpoints.checkpoint_examples import FILES, FIRST, SECOND, make_checkpoint


def test_a_whole_checkpoint_has_no_faults(tmp_path: Path) -> None:
    assert verify(make_checkpoint(tmp_path, 3)) == []


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([*FILES, MANIFEST_NAME]), st.integers(0, 2**20), st.integers(0, 7))
def test_a_flipped_bit_is_found_in_every_file(name: str, position: int, bit: int) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = make_checkpoint(Path(temporary), 3)
        content = bytearray((folder / name).read_bytes())
        before = bytes(content)
        content[position % len(content)] ^= 1 << bit
        (folder / name).write_bytes(content)
        faults = verify(folder)
        # Between two values of the manifest a blank may become another blank, and then nothing has changed.
        is_blank = name == MANIFEST_NAME and before.split() == bytes(content).split()
        assert is_blank or len(faults) == 1
        assert all(str(folder) in fault and name in fault for fault in faults)


def test_a_file_of_another_step_is_found(tmp_path: Path) -> None:
    """Its size is right, and its own checkpoint is whole."""
    folder, other = make_checkpoint(tmp_path, 3), make_checkpoint(tmp_path, 4)
    (folder / SECOND).write_bytes((other / SECOND).read_bytes())
    (fault,) = verify(folder)
    assert SECOND in fault
    assert "content has changed" in fault
    assert verify(other) == []


def test_every_fault_is_listed(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, 3)
    (folder / FIRST).unlink()
    (folder / SECOND).unlink()
    (folder / SECOND).mkdir()
    assert verify(folder) == [
        f"{folder} is damaged: {FIRST} is missing",
        f"{folder} is damaged: {SECOND} is not a file",
    ]


def test_the_checksum_of_a_file_is_that_of_its_bytes_and_its_progress_their_number(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for size in (0, 1, CHUNK_BYTES, CHUNK_BYTES + 3):
        content = bytes(size // 2) + b"x" * (size - size // 2)
        path.write_bytes(content)
        read: list[int] = []
        assert file_checksum(path, read.append) == xxh3_128_hexdigest(content)
        assert sum(read) == size
