"""Whole runs that want one folder: the second is refused and disturbs nothing, and the dead block nobody."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from megastable.checkpoints.folder import complete_manifest, folder_name, newest_complete, step_folders
from megastable.cli.main import app
from megastable.core.run_paths import RunPaths
from megastable.training.lock_file import Holder
from megastable.training.run_lock import RunLock
from tests.support.launches import DEEPSPEED, metrics, start, train_command, wait_for_step, write_run_file
from tests.support.scripts import run_script

NUM_STEPS = 12
RUN = {
    "megastable__training": {"total_steps": NUM_STEPS, "seed": 7},
    "megastable__checkpoint": {"save_interval": 2},
}
ONE_STAGE = ("--set", "megastable.pipeline.num_stages=1")
SAVED = 4
"""The last step of which a run has a checkpoint before it is resumed."""
TIME_LIMIT_SECONDS = 200.0


def contents(folder: Path) -> dict[str, str]:
    """Map every file below a folder to the hash of its bytes."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def losses(run_dir: Path) -> list[tuple[int, float]]:
    """Return step and loss of every line of metrics."""
    return [(row["step"], row["loss"]) for row in metrics(run_dir)]


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    """Return the events of a kind."""
    rows = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == kind]


def holder_in(run_dir: Path) -> Holder:
    """Read the record of a folder's lock."""
    holder = Holder.read(RunPaths(run_dir).lock.read_bytes())
    assert holder is not None
    return holder


def check_whole(run_dir: Path, expected: list[tuple[int, float]]) -> None:
    """Check that a finished run's folder has every line once and every checkpoint, and nothing set aside."""
    # On one stage instead of two, sums are rounded in another order.
    assert [step for step, _ in losses(run_dir)] == [step for step, _ in expected]
    assert [loss for _, loss in losses(run_dir)] == pytest.approx([loss for _, loss in expected], rel=1e-5)
    checkpoints = run_dir / "checkpoints"
    steps = range(2, NUM_STEPS + 1, 2)
    assert {path.name for path in step_folders(checkpoints)} == {folder_name(step) for step in steps}
    assert not [path.name for path in checkpoints.iterdir() if path.name.startswith("step_") and path.suffix]
    for folder in step_folders(checkpoints):
        complete_manifest(folder)
    assert holder_in(run_dir).ended is not None


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Train a run to its end; returns the run file and the run folder."""
    folder = tmp_path_factory.mktemp("undisturbed")
    run_file = write_run_file(folder, **RUN)
    finished = run_script(train_command([], run_file, folder / "run"), world_size=2)
    assert finished.exit_codes == [0, 0], finished.output
    return run_file, folder / "run"


def to_resume(undisturbed: tuple[Path, Path], tmp_path: Path) -> Path:
    """Return a run folder in which the later checkpoints are not there yet."""
    run_dir = tmp_path / "run"
    shutil.copytree(undisturbed[1], run_dir)
    for folder in step_folders(run_dir / "checkpoints"):
        if folder.name > folder_name(SAVED):
            shutil.rmtree(folder)
    return run_dir


def end(launches: list[subprocess.Popen[str]]) -> None:
    """End what still runs of the launches."""
    for launch in launches:
        if launch.poll() is None:
            os.killpg(launch.pid, signal.SIGKILL)
            launch.communicate()


# Beside each other


@pytest.mark.slow
def test_of_two_resumes_at_once_one_goes_on_and_the_other_is_refused(
    undisturbed: tuple[Path, Path], tmp_path: Path
) -> None:
    run_file, run_dir = undisturbed[0], to_resume(undisturbed, tmp_path)
    launches = [start(train_command(DEEPSPEED, run_file, run_dir, "--resume")) for _ in range(2)]
    try:
        outputs = [launch.communicate(timeout=TIME_LIMIT_SECONDS)[0] for launch in launches]
    finally:
        end(launches)
    assert sorted(launch.returncode for launch in launches) == [0, 2], "\n".join(outputs)
    refused = next(output for launch, output in zip(launches, outputs, strict=True) if launch.returncode == 2)
    writer = holder_in(run_dir)
    named = f"process {writer.process_id} on {writer.host}, since {writer.since}: {writer.command}"
    assert f"[megastable] error: {run_dir} is in use by another run: {named}\n" in refused
    assert f"--deepspeed_config {run_file} --run-dir {run_dir} --resume" in writer.command
    assert refused.count("[megastable]") == 1 and "Traceback" not in refused
    check_whole(run_dir, losses(undisturbed[1]))


@pytest.fixture
def stopped(undisturbed: tuple[Path, Path], tmp_path: Path) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    """Start a run alone on one stage, and stop it in its middle with SIGSTOP."""
    run_dir = tmp_path / "run"
    run = start(train_command([sys.executable], undisturbed[0], run_dir, *ONE_STAGE))
    try:
        wait_for_step(run, run_dir, step=5)
        os.killpg(run.pid, signal.SIGSTOP)
        yield run_dir, run
    finally:
        end([run])


def test_no_start_of_any_kind_disturbs_a_run_and_its_readers_need_no_lock(
    undisturbed: tuple[Path, Path], stopped: tuple[Path, subprocess.Popen[str]]
) -> None:
    run_dir, run = stopped
    before = contents(run_dir)
    for flags in ((), ("--resume",), ("--load", str(undisturbed[1] / "checkpoints" / folder_name(SAVED)))):
        refused = run_script(train_command([], undisturbed[0], run_dir, *flags), world_size=2)
        assert refused.exit_codes[0] == 2, refused.output
        # The launcher ends it for that, before or after it has begun to listen.
        assert refused.exit_codes[1] in (-signal.SIGTERM, 128 + signal.SIGTERM), refused.output
        assert refused.output.count("[megastable]") == 1, refused.output
        assert f"{run_dir} is in use by another run: process {run.pid} on " in refused.outputs[0]
        assert refused.output.count("[megastable]") == 1 and "Traceback" not in refused.output
    seen = CliRunner().invoke(app, ["watch", str(run_dir), "--once"])
    assert seen.exit_code == 0 and "newest step" in seen.output, seen.output
    assert contents(run_dir) == before
    os.killpg(run.pid, signal.SIGCONT)
    output, _ = run.communicate(timeout=TIME_LIMIT_SECONDS)
    assert run.returncode == 0, output
    check_whole(run_dir, losses(undisturbed[1]))


def test_a_killed_run_is_resumed_at_once(
    undisturbed: tuple[Path, Path], stopped: tuple[Path, subprocess.Popen[str]]
) -> None:
    run_dir, run = stopped
    os.killpg(run.pid, signal.SIGKILL)
    run.communicate(timeout=60)
    assert holder_in(run_dir).process_id == run.pid and holder_in(run_dir).ended is None
    resumed = run_script(train_command([], undisturbed[0], run_dir, *ONE_STAGE, "--resume"))
    assert resumed.exit_codes == [0] and "waits up to" not in resumed.output, resumed.output
    assert [step for step, _ in losses(run_dir)] == list(range(1, NUM_STEPS + 1))


# On several nodes


def own_address() -> str:
    """Return an address of this machine that is not the loopback's."""
    for addresses in psutil.net_if_addrs().values():
        for address in addresses:
            if address.family == socket.AF_INET and not address.address.startswith("127."):
                return str(address.address)
    pytest.skip("this machine has no address but the loopback's")


def test_the_ranks_of_other_nodes_do_not_wait_for_a_rank_0_that_is_refused(
    undisturbed: tuple[Path, Path], tmp_path: Path
) -> None:
    """No launcher ends them here."""
    run_dir = tmp_path / "run"
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    node = {
        "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "2", "MASTER_ADDR": own_address(),
        "MASTER_PORT": str(port),
    }  # fmt: skip
    command = train_command([sys.executable], undisturbed[0], run_dir)
    with RunLock.take(RunPaths(run_dir)):
        launches = [start(command, {**node, "RANK": str(rank)}) for rank in range(2)]
        try:
            outputs = [launch.communicate(timeout=TIME_LIMIT_SECONDS)[0] for launch in launches]
        finally:
            end(launches)
    assert [launch.returncode for launch in launches] == [2, 2], "\n".join(outputs)
    for where, output in zip(("", " on rank 1"), outputs, strict=True):
        assert f"[megastable] error{where}: {run_dir} is in use by another run: process {os.getpid()} on" in output
        assert "Traceback" not in output


# What happens to the folder under a run


def at_step(step: int, what: str, run_dir: str) -> None:
    """Let rank 0 do ``what`` to the folder during a step."""
    from megastable.engine.training_engine import TrainingEngine

    train_batch = TrainingEngine.train_batch
    steps = []

    def do_and_train(self: TrainingEngine, *arguments: Any, **options: Any) -> Any:
        steps.append(1)
        if os.environ["RANK"] == "0" and len(steps) == step:
            globals()[what](Path(run_dir))
        return train_batch(self, *arguments, **options)

    TrainingEngine.train_batch = do_and_train  # type: ignore[method-assign]


def take_over(run_dir: Path) -> None:
    """Do what a start on another host does that has seen no sign of life for long enough."""
    deadline = time.monotonic() + TIME_LIMIT_SECONDS
    # What is compared afterwards is not to change in the midst of the copy.
    while list((run_dir / "checkpoints").glob("*.partial")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    other = holder_in(run_dir).model_copy(update={"host": "elsewhere", "token": "other", "id_space": "other"})
    written = run_dir / "other"
    written.write_bytes(other.to_bytes())
    written.rename(RunPaths(run_dir).lock)
    shutil.copytree(run_dir, run_dir.with_name("as the other one has it"))


def remove(run_dir: Path) -> None:
    """Do what a person does who takes the folder for an old one; at once, since a save may be under way in it."""
    trash = run_dir.rename(run_dir.with_name("trash"))
    shutil.rmtree(trash)


def test_a_run_whose_folder_was_taken_over_stops_on_all_ranks_and_writes_no_more(
    undisturbed: tuple[Path, Path], tmp_path: Path
) -> None:
    run_file, run_dir = undisturbed[0], tmp_path / "run"
    # A checkpoint is due at the end of this step.
    finished = run_script(
        train_command([], run_file, run_dir), 2, first=at_step, step=4, what="take_over", run_dir=str(run_dir)
    )
    assert finished.exit_codes == [3, 3], finished.output
    assert f"[megastable] error: {run_dir} was taken over by another run, process " in finished.outputs[0]
    assert " on elsewhere, since " in finished.outputs[0]
    assert finished.output.count("[megastable]") == 1 and "Traceback" not in finished.output
    assert contents(run_dir) == contents(run_dir.with_name("as the other one has it"))
    assert [step for step, _ in losses(run_dir)] == [1, 2, 3]


def test_a_run_whose_folder_vanishes_says_so_and_goes_on_in_a_new_one(
    undisturbed: tuple[Path, Path], tmp_path: Path
) -> None:
    run_file, run_dir = undisturbed[0], tmp_path / "run"
    finished = run_script(
        train_command([], run_file, run_dir), 2, first=at_step, step=5, what="remove", run_dir=str(run_dir)
    )
    assert finished.exit_codes == [0, 0] and "Traceback" not in finished.output, finished.output
    assert finished.output.count("files_lost") == 1
    (lost,) = events(run_dir, "files_lost")
    assert lost["step"] == 5 and "config.json" in lost["data"]["files"]
    assert losses(run_dir) == losses(undisturbed[1])[4:]
    newest = newest_complete(run_dir / "checkpoints", warn=print)
    assert newest is not None and newest.name == folder_name(NUM_STEPS)
    assert (run_dir / "config.json").is_file() and holder_in(run_dir).ended is not None
