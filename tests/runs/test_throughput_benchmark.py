"""The sweep over global batches on two real processes, with sizes that take seconds."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megastable.planning.calibration import load_calibration, read_calibration_file
from megastable.planning.micro_batches import load_plan
from tests.support.launches import write_run_file
from tests.support.ranks import run_bounded
from tests.support.scripts import STARTS, Start

SIZES = [2, 4, 8]


@pytest.mark.parametrize("start", STARTS)
def test_it_measures_every_size_and_writes_all_files(tmp_path: Path, start: Start) -> None:
    run_file = write_run_file(tmp_path)
    sweep = tmp_path / "sweep.json"
    command = [
        "benchmarks/tflops_vs_gbs.py", "--deepspeed_config", str(run_file), "--global-batch-sizes",
        ",".join(map(str, SIZES)), "--micro-batch-sizes", "1,2", "--rounds", "3", "--json", str(sweep),
    ]  # fmt: skip
    exit_code, output = start("deepspeed", [*command, "--plot", str(tmp_path / "sweep")])
    assert exit_code == 0, output[-4000:]
    assert output.count("recommended start of a ramp: global batch") == 1  # rank 0 alone
    assert "median error of the prediction on batches that it has not seen" in output

    found = read_calibration_file(sweep).sweep
    assert found is not None
    assert [(row.micro_batch_size, row.global_batch_size) for row in found.rows] == [
        (micro, size) for micro in (1, 2) for size in SIZES
    ]
    for row in found.rows:
        assert row.step_seconds is not None
        assert row.step_seconds.num_steps == 3
        assert 0 < row.step_seconds.least <= row.step_seconds.median <= row.step_seconds.most
        assert row.share_of_limit is not None
    assert found.recommended_global_batch_size in SIZES
    plan, _ = load_plan(run_file, None)
    assert load_calibration(sweep, plan).cost.step_seconds(1, 4) > 0

    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert "plotly.js v" in (tmp_path / "sweep.html").read_text(encoding="utf-8")

    # One rank of two: what is refused after the ranks have met would wait for the other one.
    launch = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "29500"}
    refused = run_bounded([sys.executable, *command], 60, launch)
    assert refused.returncode == 2, refused.stdout
    assert "exists already" in refused.stdout
