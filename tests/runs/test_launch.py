"""Whole runs, as a user starts them: two at once, killed and resumed, a rank that dies, and mistakes.

Where the launcher has no part in what is tested, the ranks are forked (``run_script``).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import torch

from megastable.checkpoints.folder import folder_name
from megastable.data import prepare_corpus
from megastable.engine import node_work, rendezvous
from megastable.engine.stop_request import StopRequest
from megastable.training import build
from tests.support.failing_rank import plant_failure
from tests.support.launches import (
    DEEPSPEED,
    TORCHRUN,
    metrics,
    start,
    train_command,
    untimed,
    wait_for_step,
    write_run_file,
)
from tests.support.ranks import run_bounded
from tests.support.scripts import run_script

NUM_STEPS = 31
"""They take 336 samples: several epochs, the ramp's steps and some evaluations. No interval divides them, which shows
what is due at the last step, too."""
RUN = {
    "megastable__model__dropout": 0.1,
    "megastable__training": {"total_steps": NUM_STEPS, "seed": 7, "eval_interval": 5, "eval_samples": 6},
    "megastable__checkpoint": {"save_interval": 4},
}
ONE_STAGE = ("--set", "megastable.pipeline.num_stages=1")


def events_and_balance(run_dir: Path) -> tuple[list[dict[str, Any]], list[tuple[str, int]]]:
    """The events that no clock has part in; kind and step of that of the stages' balance."""
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    timed = [event for event in events if "slowest_stage" in event["data"]]
    balance = [(event["kind"], event["step"]) for event in timed if event["kind"] != "warning"]
    return [event for event in events if event not in timed], balance


class Lives(NamedTuple):
    """Two runs of one file: one ran to its end while the other was stopped, which then lost a rank."""

    run_file: Path
    whole_dir: Path
    whole_output: str
    killed_dir: Path
    killed_output: str
    killed_exit_code: int
    """Of the launcher."""
    killed_seconds: float
    """From the death of the rank to the end of the launcher."""
    ranks_left: list[int]
    """Ranks that outlived the launcher."""


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> Lives:
    """Kill rank 1 of the deepspeed command's run without warning, and run it whole beside that before.

    Both get the same port from their launcher. The whole run writes for other programs, too.
    """
    folder = tmp_path_factory.mktemp("lives")
    run_file = write_run_file(folder, **RUN)
    whole_dir = folder / "whole"
    killed_dir = folder / "killed in its middle"  # a blank has to come through the launcher
    writers = ["--set", "csv_monitor.enabled=true", "--set", "csv_monitor.job_name=job"]
    writers += ["--set", "tensorboard.enabled=true"]
    killed = start(train_command(DEEPSPEED, run_file, killed_dir))
    try:
        wait_for_step(killed, killed_dir, step=14)
        os.killpg(killed.pid, signal.SIGSTOP)
        whole = run_script(train_command([], run_file, whole_dir, *writers), world_size=2, launcher="deepspeed")
        ranks = {
            child.environ()["RANK"]: child
            for child in psutil.Process(killed.pid).children(recursive=True)
            if "launch/train.py" in child.cmdline() and "RANK" in child.environ()
        }
        os.killpg(killed.pid, signal.SIGCONT)
        died = time.monotonic()
        ranks["1"].kill()
        output, _ = killed.communicate(timeout=60)
        seconds = time.monotonic() - died
    finally:
        if killed.poll() is None:
            os.killpg(killed.pid, signal.SIGKILL)
    assert whole.exit_codes == [0, 0], whole.output[-4000:]
    assert 14 <= len(metrics(killed_dir)) < NUM_STEPS, "the run was not killed in its middle"
    left = [
        int(rank)
        for rank, process in ranks.items()
        if process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    ]
    return Lives(run_file, whole_dir, whole.output, killed_dir, output, killed.returncode, seconds, left)


def test_a_dead_rank_takes_the_others_down_and_is_named(lives: Lives) -> None:
    assert lives.killed_exit_code != 0
    assert lives.killed_seconds < 30
    assert lives.ranks_left == []
    output = lives.killed_output
    assert "rank 1 (stage 1, replica 0, tensor 0)" in output and "is gone" in output, output[-4000:]


def test_a_killed_run_continues_exactly_beside_another_run(lives: Lives) -> None:
    """Resumed under another launcher, it ends like the run that was never killed."""
    # What a kill in the middle of a save leaves behind, and a line that was cut short.
    (lives.killed_dir / "checkpoints" / "step_00000099.partial").mkdir()
    with open(lives.killed_dir / "metrics.jsonl", "a") as file:
        file.write('{"step": 9')

    resumed = run_bounded(train_command(TORCHRUN, lives.run_file, lives.killed_dir, "--resume"), 200)
    assert resumed.returncode == 0, resumed.stdout[-4000:]
    expected = untimed(metrics(lives.whole_dir))
    assert [row["step"] for row in expected] == list(range(1, NUM_STEPS + 1))
    assert untimed(metrics(lives.killed_dir)) == expected
    assert sum("eval_loss" in row for row in expected) == 7
    assert [row["step"] for row in expected if "layers" in row] == [10, 20, 30, NUM_STEPS]
    assert (lives.whole_dir / "checkpoints" / folder_name(NUM_STEPS)).is_dir()
    assert expected[-1]["layers"]["block_0"].keys() >= {"grad_norm", "update_ratio", "max_attention_logit"}
    assert all("loss_volatility" in row for row in expected[2:])
    events, balance = events_and_balance(lives.whole_dir)
    resumed_events, resumed_balance = events_and_balance(lives.killed_dir)
    of_the_resume = [event["kind"] for event in resumed_events if event["kind"] in ("resume", "set_aside")]
    assert of_the_resume == ["set_aside", "resume"]
    assert [event for event in resumed_events if event["kind"] not in of_the_resume] == events
    assert resumed_balance == balance
    kinds = [event["kind"] for event in events]
    assert [kind for kind in kinds if kind != "epoch"] == ["first_loss", "ramp", "ramp"]
    assert kinds.count("epoch") == int(expected[-1]["epoch"]) > 1
    assert balance == [("stage_balance", 10)]
    assert expected[-1]["loss"] < expected[0]["loss"] - 1
    assert "unigram entropy of the text" in lives.whole_output


def test_a_checkpoint_of_a_finished_run_is_taken_up_in_another_folder(lives: Lives, tmp_path: Path) -> None:
    checkpoint = lives.whole_dir / "checkpoints" / "step_00000020"
    loaded = run_script(train_command([], lives.run_file, tmp_path / "loaded", "--load", str(checkpoint)), 2)
    assert loaded.exit_codes == [0, 0], loaded.output[-4000:]
    assert untimed(metrics(tmp_path / "loaded")) == untimed(metrics(lives.whole_dir))[20:]


def test_monitors_get_the_values_of_the_metrics(lives: Lives) -> None:
    rows = metrics(lives.whole_dir)
    lines = (lives.whole_dir / "csv_monitor" / "job" / "Train_loss.csv").read_text().splitlines()[1:]
    logged = [[float(value) for value in line.split(",")] for line in lines]
    assert [samples for samples, _ in logged] == [row["consumed_samples"] for row in rows]
    assert [loss for _, loss in logged] == pytest.approx([row["loss"] for row in rows])
    assert list((lives.whole_dir / "tensorboard").rglob("events.out.tfevents*"))
    layer = (lives.whole_dir / "csv_monitor" / "job" / "Train_layers_block_0_grad_norm.csv").read_text()
    assert float(layer.splitlines()[-1].split(",")[1]) == pytest.approx(rows[-1]["layers"]["block_0"]["grad_norm"])


@pytest.mark.slow
def test_two_launches_do_not_meet_and_one_of_them_killed_whole_goes_on(tmp_path: Path) -> None:
    """Start both at the same moment, and kill every process of one without warning, its rank 0 included."""
    run_file = write_run_file(tmp_path, **{**RUN, "megastable__training": {"total_steps": 60}})
    folders = [tmp_path / name for name in ("one", "other")]
    launches = [start(train_command(DEEPSPEED, run_file, folder)) for folder in folders]
    try:
        wait_for_step(launches[1], folders[1], step=6)
        os.killpg(launches[1].pid, signal.SIGKILL)
        outputs = [launch.communicate(timeout=200)[0] for launch in launches]
    finally:
        for launch in launches:
            if launch.poll() is None:
                os.killpg(launch.pid, signal.SIGKILL)
    assert launches[0].returncode == 0, outputs[0]
    assert 6 <= len(metrics(folders[1])) < 60, "the run was not killed in its middle"
    resumed = run_script(train_command([], run_file, folders[1], "--resume"), world_size=2)
    assert resumed.exit_codes == [0, 0], resumed.output[-4000:]
    one, other = (untimed(metrics(folder)) for folder in folders)
    assert len(one) == 60 and one == other


def test_a_run_that_no_loss_scale_can_save_stops_with_a_diagnosis(tmp_path: Path) -> None:
    changes = {
        "fp16": {"enabled": True, "initial_scale_power": 2, "min_loss_scale": 2, "hysteresis": 1},
        "megastable__training": {"total_steps": 50, "fp16_on_cpu": True},
        # The embedding is finite and the logits, its products, are not.
        "megastable__init": {"embedding_std": 9000.0},
        "megastable__monitors": {"max_skips_at_min_scale": 3},
    }
    run_file = write_run_file(tmp_path, **{**RUN, **changes})
    finished = run_script(train_command([], run_file, tmp_path / "run", *ONE_STAGE))
    assert finished.exit_codes == [3] and "Traceback" not in finished.output, finished.output[-4000:]
    assert "max_activation of head (stage 0 of 1), the first such layer, is not finite" in finished.output
    assert "fp16.min_loss_scale = 2" in finished.output
    rows = metrics(tmp_path / "run")
    assert [row["loss_scale"] for row in rows] == [4, 2, 2, 2] and all(row["skipped"] for row in rows)
    assert {row["lr"] for row in rows} == {rows[0]["lr"]} and rows[-1]["skipped_steps"] == 4
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    kinds = [event["kind"] for event in events if event["kind"] not in ("warning", "ramp")]
    # The loss of the first is not finite, which no lower scale ends: its culprit is looked for, once in the row.
    assert kinds == ["overflow", "culprit", *["overflow"] * 3, "stop"]
    first, *_ = events
    assert first["kind"] == "warning" and "the first loss is nan" in first["text"]
    # The embedding's own output uses half of what fp16 can hold: a warning while it is still finite.
    assert 0.25 < rows[1]["layers"]["embedding"]["max_activation"] / 65504 < 1


NAMED = "rank 1 (stage 1, replica 0, tensor 0) failed: RuntimeError: made to fail"


def test_a_rank_with_an_error_is_named_with_its_trace(tmp_path: Path) -> None:
    command = train_command([], write_run_file(tmp_path, **RUN), tmp_path / "run")
    failed = run_script(command, world_size=2, timeout_seconds=60, first=plant_failure)
    assert failed.exit_codes == [1, 1], failed.output[-4000:]
    assert NAMED in failed.outputs[1] and "Traceback" in failed.outputs[1], failed.output[-4000:]


@pytest.mark.slow
def test_a_rank_with_an_error_is_named_through_the_launcher(tmp_path: Path) -> None:
    run_file = write_run_file(tmp_path, **RUN)
    command = [*TORCHRUN, "-m", "tests.support.failing_rank", str(run_file), str(tmp_path / "run")]
    failed = run_bounded(command, 60)
    assert failed.returncode != 0
    assert NAMED in failed.stdout, failed.stdout[-4000:]


def test_a_resume_on_other_data_is_refused(tmp_path: Path) -> None:
    run_file = write_run_file(tmp_path, **{**RUN, "megastable__training": {"total_steps": 4}})
    command = train_command([], run_file, tmp_path / "run", *ONE_STAGE)
    first = run_script(command)
    assert first.exit_codes == [0], first.output[-4000:]
    (tmp_path / "text" / "more.txt").write_text("a document that was not there before")
    config = (tmp_path / "run" / "config.json").read_text()
    refused = run_script([*command, "--resume", "--set", "megastable.training.total_steps=5"])
    assert refused.exit_codes == [2] and "tokenised corpus" in refused.output, refused.output[-4000:]
    assert (tmp_path / "run" / "config.json").read_text() == config


def test_slurm_variables_are_enough(tmp_path: Path) -> None:
    run_file = write_run_file(tmp_path, **{**RUN, "megastable__training": {"total_steps": 2}})
    finished = run_script(train_command([], run_file, tmp_path / "run"), world_size=2, launcher="slurm")
    assert finished.exit_codes == [0, 0], finished.output[-4000:]
    assert len(metrics(tmp_path / "run")) == 2


MISTAKES: dict[str, tuple[list[str], dict[str, str], str]] = {
    "unknown key": (["--set", "megastable.model.num_layer=2"], {}, "num_layers"),
    "bad value": (["--set", "optimizer.params.lr=-1"], {}, "optimizer.params.lr"),
    "stages do not divide": ([], {"WORLD_SIZE": "3"}, "world size 3"),
    "another world than asked for": (["--set", "megastable.training.world_size=4"], {}, "asks for 4"),
    "batch does not divide": (["--set", "train_micro_batch_size_per_gpu=3"], {}, "nearest legal sizes are 3 or 6"),
    "missing package": (["--set", "comet.enabled=true"], {}, "pip install comet_ml"),
    "nothing to resume": (["--resume"], {}, "no complete checkpoint"),
    "nothing to load": (["--load", "no/such/folder"], {}, "no/such/folder"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gives_one_message_and_exit_code_2(tmp_path: Path, mistake: str) -> None:
    flags, variables, expected = MISTAKES[mistake]
    launch = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "29500", **variables}
    command = train_command([sys.executable], write_run_file(tmp_path, **RUN), tmp_path / "run", *flags)
    refused = run_bounded(command, 60, launch)
    assert refused.returncode == 2, refused.stdout
    assert expected in refused.stdout and "Traceback" not in refused.stdout
    assert not (tmp_path / "run").exists()


def let_no_compiler_be_found() -> None:
    """Do what the environment variable CXX does where torch's compiler is imported later."""
    torch._inductor.config.cpp.cxx = (None, "no-such-compiler")


# These need torch, whose import takes most of the time of a real process.
LATE_MISTAKES: dict[str, tuple[list[str], Callable[[], None] | None, str]] = {
    "fp16 without a device for it": (["--set", "fp16.enabled=true"], None, "fp16_on_cpu"),
    "nothing to compile with": (["--set", "megastable.model.compile=true"], let_no_compiler_be_found, "install g++"),
}


@pytest.mark.parametrize("mistake", LATE_MISTAKES)
def test_a_mistake_that_torch_is_needed_to_see_gives_the_same(tmp_path: Path, mistake: str) -> None:
    flags, first, expected = LATE_MISTAKES[mistake]
    # Rank 0 of two: what is refused after the ranks have met would wait for the other one.
    command = train_command([], write_run_file(tmp_path, **RUN), tmp_path / "run", *flags)
    refused = run_script(command, launcher="deepspeed", environment={"WORLD_SIZE": "2", "LOCAL_SIZE": "2"}, first=first)
    assert refused.exit_codes == [2], refused.output
    assert refused.output.count("[megastable] error") == 1, refused.output
    assert expected in refused.output and "Traceback" not in refused.output
    assert not (tmp_path / "run").exists()


def leave_late(late: str) -> None:
    """Let a rank be slow where it has met a mistake, as on a machine with more to do."""
    if os.environ["RANK"] == late:
        leave = StopRequest.leave

        def leave_later(stop: StopRequest, handler: signal.Handlers) -> None:
            time.sleep(1.5)
            leave(stop, handler)

        setattr(StopRequest, "leave", leave_later)  # noqa: B010  # its type is kept


@pytest.mark.parametrize("late", ["nobody", "0", "1"])
def test_refused_data_is_one_message_of_all_ranks_and_exit_code_2(tmp_path: Path, late: str) -> None:
    """The ranks have met by then. Those that the launcher ends for the exit of rank 0 have nothing to report."""
    words = train_command([], write_run_file(tmp_path, **RUN), tmp_path / "run")
    words += ["--set", "megastable.data.source.path=no/such/text"]
    refused = run_script(words, 2, "deepspeed", first=leave_late, late=late)
    assert refused.exit_codes[0] == 2 and "no/such/text" in refused.outputs[0], refused.output
    assert refused.output.count("[megastable]") == 1 and "Traceback" not in refused.output, refused.output
    assert not (tmp_path / "run").exists() and not (tmp_path / "cache").exists()


def be_a_slow_node(counter: str) -> None:
    """Make every rank a node of its own, where the corpus of rank 1's takes longer than connecting may."""
    rank = os.environ["RANK"]
    socket.gethostname = lambda: f"node{rank}"
    rendezvous.CONNECT_TIMEOUT = timedelta(seconds=6)
    node_work.REPORT_SECONDS = 0.5

    def prepare_slowly(*arguments: Any, **options: Any) -> Any:
        if rank == "1":
            time.sleep(8)
        Path(counter, rank).touch()
        return prepare_corpus(*arguments, **options)

    setattr(build, "prepare_corpus", prepare_slowly)  # noqa: B010  # build does not export it


@pytest.mark.slow
def test_a_node_may_take_longer_for_its_data_than_for_connecting(tmp_path: Path) -> None:
    run_file = write_run_file(tmp_path, **{**RUN, "megastable__training": {"total_steps": 1}})
    with socket.create_server(("", 0)) as probe:
        port = probe.getsockname()[1]
    variables = {"MASTER_ADDR": socket.gethostname(), "MASTER_PORT": str(port), "LOCAL_SIZE": "1", "LOCAL_RANK": "0"}
    finished = run_script(
        train_command([], run_file, tmp_path / "run"), 2, "deepspeed", environment=variables,
        first=be_a_slow_node, counter=str(tmp_path),
    )  # fmt: skip
    assert finished.exit_codes == [0, 0], finished.output[-4000:]
    assert "[megastable] waits for the data on node1 (rank 1), " in finished.outputs[0]
    assert (tmp_path / "0").exists() and (tmp_path / "1").exists()


def mpi_variables(rank: int) -> dict[str, str]:
    """Return what Open MPI's mpirun tells a process of two on this machine."""
    return {
        "OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_RANK": str(rank),
    }  # fmt: skip


def test_mpis_variables_are_one_run(tmp_path: Path) -> None:
    run_file = write_run_file(tmp_path, **{**RUN, "megastable__training": {"total_steps": 1}})
    command = train_command([sys.executable], run_file, tmp_path / "run")
    ranks = [start(command, mpi_variables(rank)) for rank in range(2)]
    try:
        outputs = [rank.communicate(timeout=200)[0] for rank in ranks]
    finally:
        for rank in ranks:
            if rank.poll() is None:
                os.killpg(rank.pid, signal.SIGKILL)
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    assert "= 2 processes" in outputs[0] and "run folder" not in outputs[1]
    assert len(metrics(tmp_path / "run")) == 1


@pytest.mark.slow
def test_a_compiler_that_the_environment_names_is_looked_for(tmp_path: Path) -> None:
    command = train_command([sys.executable], write_run_file(tmp_path, **RUN), tmp_path / "run")
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "29500", "CXX": "no-such-compiler"}
    refused = run_bounded([*command, "--set", "megastable.model.compile=true"], 60, variables)
    assert refused.returncode == 2 and "install g++" in refused.stdout, refused.stdout


@pytest.mark.slow
def test_an_unread_hostfile_is_refused_and_shown_once_through_the_launcher(tmp_path: Path) -> None:
    run_file = write_run_file(tmp_path, **RUN)
    # Neither the usual command nor the usual spelling.
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "2", f"--hostf={tmp_path / 'hosts'}"]
    refused = run_bounded(train_command(launcher, run_file, tmp_path / "run"), 60)
    assert refused.returncode == 2, refused.stdout
    assert refused.stdout.count(f"asks for --hostfile {tmp_path / 'hosts'}") == 1, refused.stdout
    assert "Traceback" not in refused.stdout and not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--set", "fp16.enabled=maybe"], 'fp16.enabled = "maybe"'),
        # As a shell splits a path with a blank that is not quoted.
        (["--load", "my", "run"], "unrecognized arguments: run; a path with a blank has to be quoted"),
    ],
)
def test_a_mistake_shows_through_the_launcher(words: list[str], message: str, tmp_path: Path) -> None:
    run_file = write_run_file(tmp_path, **RUN)
    refused = run_bounded(train_command(DEEPSPEED, run_file, tmp_path / "run", *words), 60)
    assert refused.returncode == 2, refused.stdout
    assert refused.stdout.count(message) == 1 and "Traceback" not in refused.stdout
    assert not (tmp_path / "run").exists()


def test_a_used_run_folder_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    old = tmp_path / "run" / "metrics.jsonl"
    old.write_text('{"step": 1}\n')
    refused = subprocess.run(
        train_command([sys.executable], write_run_file(tmp_path, **{**RUN, "megastable__pipeline": {}}), old.parent),
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert refused.returncode == 2 and "--run-dir" in refused.stderr
    assert old.read_text() == '{"step": 1}\n'
