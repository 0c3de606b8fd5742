"""Run folders by names that are all odd at once: trained, resumed, loaded from, and looked at by the command."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megastable.checkpoints.folder import folder_name
from tests.support.launches import metrics, train_command, write_run_file
from tests.support.odd_names import ODD_NAMES
from tests.support.ranks import CPU_ONLY, REPOSITORY
from tests.support.scripts import run_script

COMMAND = [sys.executable, "-c", "from megastable.cli.main import main; main()"]
LONG = "a long name"
BYTES = "bytes of no encoding"
FOLDERS = {
    "odd text": Path(*(name for what, name in ODD_NAMES.items() if what not in (LONG, BYTES))),
    "bytes of no encoding": Path(ODD_NAMES[BYTES]),
}


@pytest.mark.parametrize("what", FOLDERS)
def test_a_run_folder_may_have_any_name(tmp_path: Path, what: str) -> None:
    writers = {"csv_monitor": {"enabled": True}, "tensorboard": {"enabled": what != BYTES}}
    run_file = write_run_file(tmp_path, megastable__checkpoint={"save_interval": 1}, **writers)
    run_dir = tmp_path / FOLDERS[what]
    loaded_dir = tmp_path / "loaded" / FOLDERS[what]
    one_stage = ("--set", "megastable.pipeline.num_stages=1")
    for folder, total_steps, start in (
        (run_dir, 1, "--resume=auto"),
        (run_dir, 2, "--resume=auto"),
        (loaded_dir, 2, f"--load={run_dir / 'checkpoints' / folder_name(1)}"),
    ):
        length = ("--set", f"megastable.training.total_steps={total_steps}")
        finished = run_script(train_command([], run_file, folder, start, *one_stage, *length))
        assert finished.exit_codes == [0], finished.output
    assert [row["step"] for row in metrics(run_dir)] == [1, 2]
    assert metrics(loaded_dir)[0]["loss"] == metrics(run_dir)[1]["loss"]
    assert len(list(run_dir.glob("csv_monitor/*/Train_loss.csv"))) == 1

    picture = ["--output", str(tmp_path / "run.svg")]
    for words in (["watch", "--once"], ["checkpoints", "--verify"], ["plot", *picture]):
        looked = subprocess.run(
            [*COMMAND, *words, str(run_dir)], cwd=REPOSITORY, capture_output=True, timeout=120, env=environment()
        )
        assert looked.returncode == 0 and b"Traceback" not in looked.stderr, looked.stderr


def environment() -> dict[str, str]:
    """Return the variables of this process, with the repository to import from."""
    return {**os.environ, **CPU_ONLY, "PYTHONPATH": str(REPOSITORY)}
