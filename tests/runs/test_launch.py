"""Whole runs, as a user starts them: two at once, killed and resumed, a rank that dies, and mistakes."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.launches import DEEPSPEED, TORCHRUN, TRAIN, metrics, start, wait_for_step, write_run_file
from tests.support.ranks import run_bounded

RUN = {
    "megastable__model__dropout": 0.1,
    "megastable__training": {"total_steps": 24, "seed": 7, "eval_interval": 5, "eval_samples": 6},
    "megastable__checkpoint": {"save_interval": 4},
}  # 24 steps take 252 samples: several epochs, the ramp's steps and some evaluations
TIMED = {
    "step_seconds", "tokens_per_second", "tflops_per_device", "hardware_tflops_per_device", "slowest_rank",
    "slowest_rank_share", "stage_busy_seconds", "host_memory_gib", "consistency_seconds",
}  # fmt: skip


def untimed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key not in TIMED} for row in rows]


def events_and_balance(run_dir: Path) -> tuple[list[dict[str, Any]], list[tuple[str, int]]]:
    """The events that no clock has part in; kind and step of that of the stages' balance."""
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    timed = [event for event in events if "slowest_stage" in event["data"]]
    told = [(event["kind"], event["step"]) for event in timed if event["kind"] != "warning"]
    return [event for event in events if event not in timed], told


def train_command(launcher: list[str], run_file: Path, run_dir: Path, *flags: str) -> list[str]:
    return [*launcher, *TRAIN, "--deepspeed_config", str(run_file), "--run-dir", str(run_dir), *flags]


def test_a_killed_run_continues_exactly_beside_another_run(tmp_path: Path) -> None:
    """Two launches at once, one is killed without warning; resumed under another launcher it ends like the other."""
    run_file = write_run_file(tmp_path, **RUN)
    whole_dir, killed_dir = tmp_path / "whole", tmp_path / "killed"
    whole = start(train_command(DEEPSPEED, run_file, whole_dir))
    killed = start(train_command(DEEPSPEED, run_file, killed_dir))
    try:
        wait_for_step(killed, killed_dir, step=14)
        os.killpg(killed.pid, signal.SIGKILL)
        killed.communicate(timeout=30)
        output, _ = whole.communicate(timeout=200)
        assert whole.returncode == 0, output[-4000:]
    finally:
        for process in (whole, killed):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    # What a kill in the middle of a save leaves behind, and a line that was cut short.
    (killed_dir / "checkpoints" / "step_00000099.partial").mkdir()
    with open(killed_dir / "metrics.jsonl", "a") as file:
        file.write('{"step": 9')

    resumed = run_bounded(train_command(TORCHRUN, run_file, killed_dir, "--resume"), 200)
    assert resumed.returncode == 0, resumed.stdout[-4000:]
    expected = untimed(metrics(whole_dir))
    assert [row["step"] for row in expected] == list(range(1, 25))
    assert untimed(metrics(killed_dir)) == expected
    assert sum("eval_loss" in row for row in expected) == 5
    assert [row["step"] for row in expected if "layers" in row] == [10, 20, 24]
    assert expected[-1]["layers"]["block_0"].keys() >= {"grad_norm", "update_ratio", "max_attention_logit"}
    assert all("loss_volatility" in row for row in expected[2:])
    events, balance = events_and_balance(whole_dir)
    assert events_and_balance(killed_dir) == (events, balance)
    assert [event["kind"] for event in events] == ["first_loss", "ramp", "ramp"]
    assert balance == [("stage_balance", 10)]
    assert expected[-1]["loss"] < expected[0]["loss"] - 1
    assert "unigram entropy of the text" in output

    # A second life of the finished run in another folder: --load takes up that checkpoint.
    loaded = run_bounded(
        train_command(
            TORCHRUN, run_file, tmp_path / "loaded", "--load", str(whole_dir / "checkpoints" / "step_00000020"),
        ),
        200,
    )  # fmt: skip
    assert loaded.returncode == 0, loaded.stdout[-4000:]
    assert untimed(metrics(tmp_path / "loaded")) == expected[20:]


def test_a_run_that_no_loss_scale_can_save_stops_with_a_diagnosis(tmp_path: Path) -> None:
    changes = {
        "fp16": {"enabled": True, "initial_scale_power": 2, "min_loss_scale": 2, "hysteresis": 1},
        "megastable__training": {"total_steps": 50, "fp16_on_cpu": True},
        # The embedding is finite and the logits, its products, are not.
        "megastable__init": {"embedding_std": 9000.0},
        "megastable__monitors": {"max_skips_at_min_scale": 3},
    }
    run_file = write_run_file(tmp_path, **{**RUN, **changes})
    command = train_command([sys.executable], run_file, tmp_path / "run", "--set", "megastable.pipeline.num_stages=1")
    finished = run_bounded(command, 120)
    assert finished.returncode == 3 and "Traceback" not in finished.stdout, finished.stdout[-4000:]
    assert "max_activation of head, the first such layer, is not finite" in finished.stdout
    assert "fp16.min_loss_scale = 2" in finished.stdout
    rows = metrics(tmp_path / "run")
    assert [row["loss_scale"] for row in rows] == [4, 2, 2, 2] and all(row["skipped"] for row in rows)
    assert {row["lr"] for row in rows} == {rows[0]["lr"]} and rows[-1]["skipped_steps"] == 4
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    kinds = [event["kind"] for event in events if event["kind"] not in ("warning", "ramp")]
    assert kinds == ["overflow"] * 4 + ["stop"]
    first, *_ = events
    assert first["kind"] == "warning" and "the first loss is nan" in first["text"]
    # The embedding's own output uses half of what fp16 can hold: a warning while it is still finite.
    assert 0.25 < rows[1]["layers"]["embedding"]["max_activation"] / 65504 < 1


def test_a_dead_rank_takes_the_others_down_and_is_named(tmp_path: Path) -> None:
    run_file = write_run_file(tmp_path, **{**RUN, "megastable__training": {"total_steps": 100_000}})
    launcher = start(train_command(DEEPSPEED, run_file, tmp_path / "run"))
    try:
        wait_for_step(launcher, tmp_path / "run", step=3)
        ranks = {
            child.environ()["RANK"]: child
            for child in psutil.Process(launcher.pid).children(recursive=True)
            if "launch/train.py" in child.cmdline() and "RANK" in child.environ()
        }
        started = time.monotonic()
        ranks["1"].kill()
        output, _ = launcher.communicate(timeout=60)
        assert time.monotonic() - started < 30
        assert launcher.returncode != 0
        assert "rank 1 (stage 1, replica 0, tensor 0)" in output and "is gone" in output, output[-4000:]
        assert not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks.values())
    finally:
        if launcher.poll() is None:
            os.killpg(launcher.pid, signal.SIGKILL)


def test_a_rank_with_an_error_is_named_with_its_trace(tmp_path: Path) -> None:
    run_file = write_run_file(tmp_path, **RUN)
    started = time.monotonic()
    failed = run_bounded(
        [*TORCHRUN, "-m", "tests.support.failing_rank", str(run_file), str(tmp_path / "run")], 120
    )  # fmt: skip
    assert failed.returncode != 0
    assert time.monotonic() - started < 60  # the start of the processes included
    named = "rank 1 (stage 1, replica 0, tensor 0) failed: RuntimeError: made to fail"
    assert named in failed.stdout, failed.stdout[-4000:]


def test_a_resume_on_other_data_is_refused(tmp_path: Path) -> None:
    run_file = write_run_file(tmp_path, **{**RUN, "megastable__training": {"total_steps": 4}})
    command = train_command([sys.executable], run_file, tmp_path / "run", "--set", "megastable.pipeline.num_stages=1")
    first = run_bounded(command, 120)
    assert first.returncode == 0, first.stdout[-4000:]
    (tmp_path / "text" / "more.txt").write_text("a document that was not there before")
    config = (tmp_path / "run" / "config.json").read_text()
    refused = run_bounded([*command, "--resume", "--set", "optimizer.params.lr=0.5"], 120)
    assert refused.returncode == 2 and "tokenised corpus" in refused.stdout, refused.stdout[-4000:]
    assert (tmp_path / "run" / "config.json").read_text() == config


def test_slurm_variables_are_enough(tmp_path: Path) -> None:
    run_file = write_run_file(tmp_path, **{**RUN, "megastable__training": {"total_steps": 2}})
    variables = {
        "SLURM_NTASKS": "2", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "localhost",
        "SLURM_JOB_ID": str(_job_with_free_port()),
    }  # fmt: skip
    command = train_command([sys.executable], run_file, tmp_path / "run")
    tasks = [start(command, {**variables, "SLURM_PROCID": str(task), "SLURM_LOCALID": str(task)}) for task in range(2)]
    try:
        outputs = [task.communicate(timeout=120)[0] for task in tasks]
        assert [task.returncode for task in tasks] == [0, 0], outputs
    finally:
        for task in tasks:
            if task.poll() is None:
                task.kill()
    assert len(metrics(tmp_path / "run")) == 2


def _job_with_free_port() -> int:
    while True:
        job = random.randrange(10_000)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", 20_000 + job)) != 0:
                return job


def test_monitors_get_the_values_of_the_metrics(tmp_path: Path) -> None:
    monitors = {"csv_monitor": {"enabled": True, "job_name": "job"}, "tensorboard": {"enabled": True}}
    changes = {**RUN, **monitors, "megastable__training": {"total_steps": 3}}
    finished = run_bounded(train_command(DEEPSPEED, write_run_file(tmp_path, **changes), tmp_path / "run"), 120)
    assert finished.returncode == 0, finished.stdout[-4000:]
    rows = metrics(tmp_path / "run")
    lines = (tmp_path / "run" / "csv_monitor" / "job" / "Train_loss.csv").read_text().splitlines()[1:]
    logged = [[float(value) for value in line.split(",")] for line in lines]
    assert [samples for samples, _ in logged] == [row["consumed_samples"] for row in rows]
    assert [loss for _, loss in logged] == pytest.approx([row["loss"] for row in rows])
    assert list((tmp_path / "run" / "tensorboard").rglob("events.out.tfevents*"))
    layer = (tmp_path / "run" / "csv_monitor" / "job" / "Train_layers_block_0_grad_norm.csv").read_text()
    assert float(layer.splitlines()[-1].split(",")[1]) == pytest.approx(rows[-1]["layers"]["block_0"]["grad_norm"])


MISTAKES: dict[str, tuple[list[str], dict[str, str], str]] = {
    "unknown key": (["--set", "megastable.model.num_layer=2"], {}, "num_layers"),
    "bad value": (["--set", "optimizer.params.lr=-1"], {}, "optimizer.params.lr"),
    "stages do not divide": ([], {"WORLD_SIZE": "3"}, "world size 3"),
    "another world than asked for": (["--set", "megastable.training.world_size=4"], {}, "asks for 4"),
    "batch does not divide": (["--set", "train_micro_batch_size_per_gpu=3"], {}, "nearest legal sizes are 3 or 6"),
    "missing package": (["--set", "comet.enabled=true"], {}, "pip install comet_ml"),
    "fp16 without a device for it": (["--set", "fp16.enabled=true"], {"DS_ACCELERATOR": "cpu"}, "fp16_on_cpu"),
    "nothing to compile with": (["--set", "megastable.model.compile=true"], {"CXX": "no-such-compiler"}, "install g++"),
    "no data": (["--set", "megastable.data.source.path=no/such/text"], {}, "no/such/text"),
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


def test_a_mistake_shows_through_the_launcher(tmp_path: Path) -> None:
    run_file = write_run_file(tmp_path, **RUN)
    refused = run_bounded(train_command(DEEPSPEED, run_file, tmp_path / "run", "--set", "fp16.enabled=maybe"), 60)
    assert refused.returncode == 2, refused.stdout
    assert refused.stdout.count('fp16.enabled = "maybe"') == 1 and "Traceback" not in refused.stdout


def test_an_unread_hostfile_is_refused(tmp_path: Path) -> None:
    run_file = write_run_file(tmp_path, **RUN)
    launcher = [*DEEPSPEED, "--hostfile", str(tmp_path / "hosts")]
    refused = run_bounded(train_command(launcher, run_file, tmp_path / "run"), 60)
    assert refused.returncode == 2 and str(tmp_path / "hosts") in refused.stdout, refused.stdout


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
