"""Whole runs that end in an unusual way: a stop, a kill inside a save, nothing left to do; and what they leave."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from megastable.checkpoints.folder import DELETING_SUFFIX, PARTIAL_SUFFIX, folder_name, newest_complete, step_folders
from megastable.core.errors import UserError
from megastable.core.init_std import INIT_SCHEMES
from tests.support.launches import metrics, train_command, write_run_file
from tests.support.scripts import FinishedScript, run_script


def run(run_file: Path, run_dir: Path, *flags: str, **first: Any) -> FinishedScript:
    """Train on two stages."""
    return run_script(train_command([], run_file, run_dir, *flags), world_size=2, **first)


def events(run_dir: Path, *kinds: str) -> list[dict[str, Any]]:
    """Return the events of these kinds."""
    rows = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] in kinds]


def contents(folder: Path) -> dict[str, str]:
    """Map every file below a folder to the hash of its bytes."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Train four steps, saved every two; returns the run file, which has eight, and the run folder."""
    folder = tmp_path_factory.mktemp("trained")
    run_file = write_run_file(folder, megastable__checkpoint={"save_interval": 2})
    finished = run(run_file, folder / "run", "--set", "megastable.training.total_steps=4")
    assert finished.exit_codes == [0, 0], finished.output
    return run_file, folder / "run"


def copy_of(trained: tuple[Path, Path], tmp_path: Path) -> tuple[Path, Path]:
    """Return the run file, and a copy of the run folder for one test."""
    run_dir = tmp_path / "run"
    shutil.copytree(trained[1], run_dir)
    return trained[0], run_dir


# Stops


def draw_weights_that_overflow() -> None:
    """Let the scheme fixed draw with a std that no run file may have."""
    INIT_SCHEMES["fixed"] = lambda size, std: 1e30


def test_overflows_at_every_step_of_bf16_stop_the_run_on_all_ranks_with_a_diagnosis(tmp_path: Path) -> None:
    run_file = write_run_file(
        tmp_path,
        bf16={"enabled": True},
        megastable__init={"scheme": "fixed", "std": 1.0},
        megastable__monitors={"max_skips_at_min_scale": 3},
        megastable__checkpoint={"save_interval": 3},
    )
    finished = run(run_file, tmp_path / "run", first=draw_weights_that_overflow)
    assert finished.exit_codes == [3, 3], finished.output
    assert "the run stops at step 3" in finished.outputs[0]
    assert "(stage 0 of 2), the first such layer, is not finite" in finished.outputs[0]
    assert "is gone" not in finished.output and "got SIGTERM" not in finished.output
    assert "Traceback" not in finished.output
    assert "error" not in finished.outputs[1], "one rank says why, for all"
    assert [row["skipped"] for row in metrics(tmp_path / "run")] == [True] * 3
    assert len(events(tmp_path / "run", "stop")) == 1
    assert newest_complete(tmp_path / "run" / "checkpoints", warn=print) is None


def find_a_mistake_late() -> None:
    """Let all ranks find a mistake of the user's once they are connected."""
    from megastable.training import build

    def check(value: str, what: str) -> None:
        if "corpus" in what:
            raise UserError(f"{what} differs")

    vars(build).update(check_equal_on_all_ranks=check)


def test_a_mistake_that_connected_ranks_find_is_reported_once_and_no_rank_reports_a_loss(
    trained: tuple[Path, Path], tmp_path: Path
) -> None:
    finished = run(trained[0], tmp_path / "run", first=find_a_mistake_late)
    assert finished.exit_codes == [2, -signal.SIGTERM], finished.output
    assert finished.output.count("the tokenised corpus of megastable.data differs") == 1
    assert "is gone" not in finished.output and "got SIGTERM" not in finished.output


def load_a_bad_weight() -> None:
    """Let one weight of the last stage be NaN after a load."""
    from megastable.training import build

    load = vars(build)["load_checkpoint"]

    def load_checkpoint(folder: Path, manifest: Any, state: Any, layout: Any, seed: int) -> Any:
        reached = load(folder, manifest, state, layout, seed)
        with torch.no_grad():
            for partition in state.partitions:
                if partition.held and int(os.environ["RANK"]) == 1:
                    partition.held[0].parameter.view(-1)[0] = float("nan")
        return reached

    vars(build).update(load_checkpoint=load_checkpoint)


def test_a_weight_that_is_no_number_stops_the_run_and_leaves_older_checkpoints_as_they_were(
    trained: tuple[Path, Path], tmp_path: Path
) -> None:
    run_file, run_dir = copy_of(trained, tmp_path)
    before = contents(run_dir / "checkpoints")
    # The step of the stop is one at which a checkpoint is due.
    flags = ["--resume", "--set", "megastable.monitors.max_skips_at_min_scale=3"]
    finished = run(run_file, run_dir, *flags, "--set", "megastable.checkpoint.save_interval=7", first=load_a_bad_weight)
    assert finished.exit_codes == [3, 3], finished.output
    assert "the run stops at step 7" in finished.outputs[0] and "(stage 1 of 2)" in finished.outputs[0]
    assert contents(run_dir / "checkpoints") == before
    finished = run(run_file, run_dir, "--resume")
    assert finished.exit_codes == [0, 0], finished.output
    assert [row["skipped"] for row in metrics(run_dir)] == [False] * 8


def lose_the_output() -> None:
    """Give this rank a standard output whose reader has left."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    os.dup2(write_end, 1)


def test_a_run_whose_output_nobody_reads_goes_on(trained: tuple[Path, Path], tmp_path: Path) -> None:
    run_file, run_dir = copy_of(trained, tmp_path)
    finished = run(run_file, run_dir, "--resume", first=lose_the_output)
    assert finished.exit_codes == [0, 0], finished.output
    assert finished.outputs[0].count("standard output cannot be written (Broken pipe)") == 1
    assert len(metrics(run_dir)) == 8 and "Traceback" not in finished.output


# Kills inside a save

KILLED_RANK = {
    "inside the file of rank 1": 1,
    "after the file of rank 1": 1,
    "before rank 0 gives the folder its name": 0,
}


def be_killed_in_a_save(where: str, step: int) -> None:
    """End this rank with SIGKILL in the save of a step, at the named place."""
    from megastable.engine import checkpoint, checkpoint_writer

    name = folder_name(step)
    if os.environ["RANK"] != str(KILLED_RANK[where]):
        return
    write_tensors = vars(checkpoint)["write_tensors"]
    publish = vars(checkpoint_writer)["publish"]

    def write_and_die(path: Path, tensors: dict[str, Any]) -> Any:
        if name not in str(path):
            return write_tensors(path, tensors)
        if where.startswith("inside"):
            tensors = dict(list(tensors.items())[:5])
        write_tensors(path, tensors)
        os.kill(os.getpid(), signal.SIGKILL)

    def die_or_publish(partial: Path, final: Path) -> None:
        if final.name == name:
            os.kill(os.getpid(), signal.SIGKILL)
        publish(partial, final)

    if KILLED_RANK[where] == 1:
        vars(checkpoint).update(write_tensors=write_and_die)
    vars(checkpoint_writer).update(publish=die_or_publish)


@pytest.mark.parametrize("where", KILLED_RANK)
def test_a_kill_inside_a_save_leaves_the_older_checkpoint_to_go_on_from(
    trained: tuple[Path, Path], tmp_path: Path, where: str
) -> None:
    run_file, run_dir = copy_of(trained, tmp_path)
    before = contents(run_dir / "checkpoints")
    finished = run(run_file, run_dir, "--resume", first=be_killed_in_a_save, where=where, step=6)
    dead = KILLED_RANK[where]
    assert finished.exit_codes[dead] == -signal.SIGKILL and finished.exit_codes[1 - dead] == 1, finished.output
    left = [path for path in (run_dir / "checkpoints").rglob("*.safetensors") if folder_name(6) in str(path)]
    assert left, "the kill came before the first file"
    finished = run(run_file, run_dir, "--resume")
    assert finished.exit_codes == [0, 0], finished.output
    assert [row["step"] for row in metrics(run_dir)] == list(range(1, 9))
    assert [event["step"] for event in events(run_dir, "resume")] == [4, 4]
    assert before.items() <= contents(run_dir / "checkpoints").items()
    assert not any(path.exists() for path in left if ".partial" in str(path))


# What a run keeps, and what a resume says


def test_the_end_is_saved_by_default_and_the_start_says_what_is_kept(tmp_path: Path) -> None:
    run_file = write_run_file(tmp_path, megastable__training={"total_steps": 2, "seed": 7})
    finished = run(run_file, tmp_path / "run")
    assert finished.exit_codes == [0, 0], finished.output
    checkpoints = tmp_path / "run" / "checkpoints"
    assert [path.name for path in step_folders(checkpoints)] == [folder_name(2)]
    assert f"keeps one checkpoint, after the last step, in {checkpoints}" in finished.outputs[0]
    finished = run(run_file, tmp_path / "nothing", "--set", "megastable.checkpoint.save_interval=null")
    assert finished.exit_codes == [0, 0], finished.output
    assert not (tmp_path / "nothing" / "checkpoints").exists()
    assert "keeps no checkpoint (megastable.checkpoint.save_interval is null)" in finished.outputs[0]


def test_a_resume_with_nothing_left_says_so_and_removes_what_a_killed_run_left(
    trained: tuple[Path, Path], tmp_path: Path
) -> None:
    run_file, run_dir = copy_of(trained, tmp_path)
    before = contents(run_dir)
    # It was killed after its last save, while that was cleaned up after.
    for suffix in (DELETING_SUFFIX, PARTIAL_SUFFIX):
        shutil.copytree(run_dir / "checkpoints" / folder_name(2), run_dir / "checkpoints" / f"{folder_name(1)}{suffix}")
    finished = run(run_file, run_dir, "--resume", "--set", "megastable.training.total_steps=4")
    assert finished.exit_codes == [0, 0], finished.output
    assert finished.output.strip().count("nothing to do: ") == 1
    assert "is at step 4, and the run has 4 steps" in finished.output and "total_steps" in finished.output
    assert contents(run_dir) == before


def test_a_resume_and_all_that_it_warns_of_are_events(trained: tuple[Path, Path], tmp_path: Path) -> None:
    run_file, run_dir = copy_of(trained, tmp_path)
    damaged = next((run_dir / "checkpoints" / folder_name(4)).glob("*.safetensors"))
    damaged.unlink()
    changes = {"optimizer.params.lr": 0.005, "megastable.training.total_steps": 3, "gradient_clipping": 1.0}
    flags = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
    finished = run(run_file, run_dir, "--resume", *flags)
    assert finished.exit_codes == [0, 0], finished.output
    (resumed,) = events(run_dir, "resume")
    assert resumed["step"] == 2 and resumed["data"] == {"checkpoint": str(run_dir / "checkpoints" / folder_name(2))}
    changed = events(run_dir, "changed")
    assert {event["data"]["key"]: event["data"]["new"] for event in changed} == {**changes}
    for event in changed:
        assert event["step"] == 2 and f"[megastable] {event['text']}\n" in finished.outputs[0], "as it was warned of"
    assert finished.outputs[0].count("changed since the checkpoint") == len(changes)
    (passed_over,) = events(run_dir, "passed_over")
    assert folder_name(4) in passed_over["text"]
