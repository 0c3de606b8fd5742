"""A token that is found to be damaged in the middle of a run, on real ranks: how they end, and what they leave."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import numpy as np
import pytest

from megastable.data import SampleOrder
from tests.support.launches import metrics, train_command, write_run_file
from tests.support.scripts import FinishedScript, run_script

SEED = 7
SEQ_LENGTH = 16
CONSUMED = 20
"""Samples of the first four steps, of 4, 4, 4 and 8."""
FIFTH_STEP = 8


def read_as_a_large_store() -> None:
    """Let a store be too large to be verified when it is opened, and have blocks of one sample."""
    from megastable.data import block_checksums, token_store

    vars(token_store).update(VERIFIED_BYTES=0)
    vars(block_checksums).update(BLOCK_BYTES=2 * SEQ_LENGTH)


def run(run_file: Path, run_dir: Path, *flags: str) -> FinishedScript:
    return run_script(train_command([], run_file, run_dir, *flags), world_size=2, first=read_as_a_large_store)


def contents(folder: Path) -> dict[str, str]:
    """Map every file below a folder to the hash of its bytes."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def token_of_the_sixth_step(num_tokens: int) -> int:
    """Find a token whose block is met in the sixth step first, and there by the second of two replicas."""
    num_samples = -(-(num_tokens - 1) // SEQ_LENGTH)
    order = SampleOrder(num_samples, SEED)(CONSUMED + np.arange(2 * FIFTH_STEP)).tolist()
    for block in range(1, num_samples):
        # The last token of a sample is the first one of the next.
        met = [position for position, sample in enumerate(order) if sample in (block - 1, block)]
        if met and met[0] > FIFTH_STEP and met[0] % 2 == 1:
            return block * SEQ_LENGTH + 5
    raise AssertionError("another seed has such a token")


@pytest.mark.parametrize(
    ("num_stages", "token", "damage"),
    [
        (2, 299, "the id 299 at token {}, outside its vocabulary of 257"),
        (1, ord("!"), "other tokens than were written"),
    ],
    ids=["an impossible id on stages", "another token on replicas"],
)
def test_a_damaged_token_ends_all_ranks_with_one_message_and_leaves_the_checkpoints(
    tmp_path: Path, num_stages: int, token: int, damage: str
) -> None:
    run_file = write_run_file(tmp_path, megastable__checkpoint={"save_interval": 2})
    run_dir = tmp_path / "run"
    layout = ["--set", f"megastable.pipeline.num_stages={num_stages}"]
    finished = run(run_file, run_dir, *layout, "--set", "megastable.training.total_steps=4")
    assert finished.exit_codes == [0, 0], finished.output
    before = contents(run_dir / "checkpoints")
    (file,) = (tmp_path / "cache").rglob("train.bin")
    tokens = np.fromfile(file, "<u2")
    position = token_of_the_sixth_step(len(tokens))
    tokens[position] = token
    tokens.tofile(file)

    finished = run(run_file, run_dir, *layout, "--resume")
    assert finished.exit_codes == [1, 1], finished.output
    assert f"DamagedDataError: the tokenised corpus is damaged: {file} has {damage.format(position)}" in finished.output
    assert "Traceback" not in finished.output
    assert [row["step"] for row in metrics(run_dir)] == [1, 2, 3, 4, 5], "it is found as it is read, not before"
    assert contents(run_dir / "checkpoints") == before

    shutil.rmtree(file.parent)
    finished = run(run_file, run_dir, *layout, "--resume")
    assert finished.exit_codes == [0, 0], finished.output
    assert [row["step"] for row in metrics(run_dir)] == list(range(1, 9))
