"""A run that comes back by itself: torchrun restarts its ranks, and ``--resume=auto`` goes on from what was saved."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.launches import TORCHRUN, metrics, start, train_command, untimed, wait_for_step, write_run_file
from tests.support.scripts import run_script
from tests.support.two_hosts import TwoHosts, two_hosts, why_not

NUM_STEPS = 20
KILLED_AFTER_STEP = 7
RUN = {
    "megastable__training": {"total_steps": NUM_STEPS, "seed": 7, "hang_timeout": 10},
    "megastable__checkpoint": {"save_interval": 3},
}
LIMIT_SECONDS = 240

NO_HOSTS = why_not()
needs_two_hosts = pytest.mark.skipif(NO_HOSTS != "", reason=NO_HOSTS)


def ranks_of(launch: subprocess.Popen[str]) -> dict[str, psutil.Process]:
    """Return the processes of a launch by their rank."""
    return {
        child.environ()["RANK"]: child
        for child in psutil.Process(launch.pid).children(recursive=True)
        if "launch/train.py" in child.cmdline() and "RANK" in child.environ()
    }


def end(launches: list[subprocess.Popen[str]]) -> None:
    """End what is left of launches."""
    for launch in launches:
        if launch.poll() is None:
            os.killpg(launch.pid, signal.SIGKILL)
            launch.wait()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the run file, and the folder of a run of it on two stages that nothing happened to."""
    folder = tmp_path_factory.mktemp("whole")
    run_file = write_run_file(folder, **RUN)
    finished = run_script(train_command([], run_file, folder / "run"), world_size=2)
    assert finished.exit_codes == [0, 0], finished.output[-4000:]
    return run_file, folder / "run"


@pytest.mark.parametrize(
    ("happens", "told"),
    [
        pytest.param(
            signal.SIGKILL, "rank 1 (stage 1, replica 0, tensor 0), process ", id="killed", marks=pytest.mark.slow
        ),
        # The launcher gives a stopped rank 30 seconds to end.
        pytest.param(signal.SIGSTOP, "[megastable] stuck: rank 1 (", id="stopped", marks=pytest.mark.exhaustive),
    ],
)
def test_a_run_that_lost_a_rank_comes_back_by_itself(
    happens: signal.Signals, told: str, whole: tuple[Path, Path], tmp_path: Path
) -> None:
    run_file, whole_dir = whole
    run_dir = tmp_path / "run"
    launch = start(train_command([*TORCHRUN, "--max-restarts", "3"], run_file, run_dir, "--resume=auto"))
    try:
        wait_for_step(launch, run_dir, KILLED_AFTER_STEP)
        ranks_of(launch)["1"].send_signal(happens)
        output, _ = launch.communicate(timeout=LIMIT_SECONDS)
    finally:
        end([launch])
    assert launch.returncode == 0, output[-6000:]
    assert told in output, output[-6000:]
    assert output.count("continues ") == 1, output[-6000:]
    assert untimed(metrics(run_dir)) == untimed(metrics(whole_dir))


@needs_two_hosts
@pytest.mark.slow
def test_a_run_that_lost_a_host_ends_there_too_and_goes_on_where_it_is_started(
    whole: tuple[Path, Path], tmp_path: Path
) -> None:
    """A stage on each host, whose launchers know each other from a hostfile; then both stages on one host."""
    run_file, whole_dir = whole
    run_dir = tmp_path / "run"
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("host0 slots=1\nhost1 slots=1\n")
    with two_hosts(tmp_path) as hosts:
        flags = ["--resume=auto", "--set", f"megastable.data.cache_dir={hosts.local}/cache"]
        launches = []
        for host in range(2):
            deepspeed = [str(Path(sys.executable).with_name("deepspeed")), "--hostfile", str(hostfile)]
            deepspeed += ["--no_ssh", "--node_rank", str(host), "--master_addr", "host0"]
            launches.append(hosts.start(host, train_command(deepspeed, run_file, run_dir, *flags)))
        try:
            wait_for_step(launches[0], run_dir, KILLED_AFTER_STEP)
            hosts.cut()
            outputs = [launch.communicate(timeout=LIMIT_SECONDS)[0] for launch in launches]
        finally:
            end(launches)
        assert all(launch.returncode != 0 for launch in launches)
        assert "[megastable] stuck: rank 1 (stage 1, replica 0, tensor 0), process " in outputs[0], outputs[0][-6000:]
        assert " on host1, last heard at step " in outputs[0], outputs[0][-6000:]
        assert " on host0 serves. That is stopped or dead" in outputs[1], outputs[1][-6000:]
        assert len(metrics(run_dir)) < NUM_STEPS, "the run was not cut off in its middle"
        # Each host has tokenised the text onto its own disk.
        assert all(list((tmp_path / name / "cache" / "tokens").glob("*/train.bin")) for name in ("host0", "host1"))

        launches = [hosts.start(0, train_command(TORCHRUN, run_file, run_dir, *flags))]
        try:
            output, _ = launches[0].communicate(timeout=LIMIT_SECONDS)
        finally:
            end(launches)
    assert launches[0].returncode == 0, output[-6000:]
    assert "continues " in output, output[-6000:]
    assert untimed(metrics(run_dir)) == untimed(metrics(whole_dir))


ELASTIC = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Without it torchrun 2.13 fails where a host joins: it waits for an address that is not written a second time."""


@needs_two_hosts
@pytest.mark.exhaustive
def test_a_run_that_lost_a_host_comes_back_with_the_replicas_that_are_left(tmp_path: Path) -> None:
    run_file = write_run_file(tmp_path, **RUN, megastable__pipeline={"num_stages": 1})
    run_dir = tmp_path / "run"
    with two_hosts(tmp_path) as hosts:
        command = elastic_command(hosts, run_file, run_dir)
        launches = [hosts.start(host, command, ELASTIC) for host in range(2)]
        try:
            wait_for_step(launches[0], run_dir, KILLED_AFTER_STEP)
            hosts.cut()
            output, _ = launches[0].communicate(timeout=LIMIT_SECONDS)
        finally:
            end(launches)
    assert launches[0].returncode == 0, output[-6000:]
    assert "layout 1 stages x 2 replicas x 1 tensor ranks = 2 processes" in output, output[-6000:]
    assert "data_parallel_size was 2, is 1" in output, output[-6000:]
    finished = run_script(train_command([], run_file, tmp_path / "whole"), world_size=1)
    assert finished.exit_codes == [0], finished.output[-4000:]
    check_same_course(metrics(run_dir), metrics(tmp_path / "whole"))
    losses, expected = ([row["loss"] for row in metrics(tmp_path / name)] for name in ("run", "whole"))
    assert losses == pytest.approx(expected, rel=1e-4)


@needs_two_hosts
@pytest.mark.exhaustive
def test_a_host_that_comes_later_is_taken_in(tmp_path: Path) -> None:
    run = {**RUN, "megastable__training": {"total_steps": 400, "seed": 7}}
    run_file = write_run_file(tmp_path, **run, megastable__pipeline={"num_stages": 1})
    run_dir = tmp_path / "run"
    with two_hosts(tmp_path) as hosts:
        command = elastic_command(hosts, run_file, run_dir)
        launches = [hosts.start(0, command, ELASTIC)]
        try:
            wait_for_step(launches[0], run_dir, KILLED_AFTER_STEP)
            launches.append(hosts.start(1, command, ELASTIC))
            outputs = [launch.communicate(timeout=LIMIT_SECONDS)[0] for launch in launches]
        finally:
            end(launches)
    assert [launch.returncode for launch in launches] == [0, 0], outputs[0][-6000:] + outputs[1][-6000:]
    assert "data_parallel_size was 1, is 2" in "".join(outputs), outputs[0][-6000:]
    # torchrun asks the ranks that run to stop, so that not a step is lost.
    assert not (run_dir / "metrics.superseded.jsonl").exists()
    finished = run_script(train_command([], run_file, tmp_path / "whole"), world_size=1, timeout_seconds=LIMIT_SECONDS)
    assert finished.exit_codes == [0], finished.output[-4000:]
    check_same_course(metrics(run_dir), metrics(tmp_path / "whole"))


def check_same_course(rows: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Check that two runs have taken the same steps on the same samples, whatever their layouts were."""
    for name in ("step", "consumed_samples", "global_batch_size", "lr"):
        assert [row[name] for row in rows] == [row[name] for row in expected], name


def elastic_command(hosts: TwoHosts, run_file: Path, run_dir: Path) -> list[str]:
    """Return the command that is given on both hosts, of which one is enough."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc_per_node", "1"]
    torchrun += ["--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-endpoint", "host0:29400", "--rdzv-id", "job"]
    # How long a round waits for more hosts than it needs; 30 seconds by default.
    torchrun += ["--rdzv-conf", "last_call_timeout=10"]
    cache = f"megastable.data.cache_dir={hosts.local}/cache"
    return train_command(torchrun, run_file, run_dir, "--resume=auto", "--set", cache)
