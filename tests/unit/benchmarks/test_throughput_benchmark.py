"""``benchmarks/tflops_vs_gbs.py`` without processes: its dry run needs no torch, and bad sizes are refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megastable.planning.micro_batches import load_plan
from tests.support.tiny_run import run_dict
from tests.unit.planning.calibration_examples import file_of

REPOSITORY = Path(__file__).parents[3]
TIME_LIMIT_SECONDS = 120
WITHOUT_TORCH = (
    "import runpy, sys; sys.modules.update(torch=None, deepspeed=None, numpy=None); "
    "sys.argv = ['tflops_vs_gbs.py', *sys.argv[1:]]; runpy.run_path('benchmarks/tflops_vs_gbs.py', run_name='__main__')"
)


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    """Write the tiny run on two stages, with micro-batches of 2."""
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(run_dict(megastable__pipeline__num_stages=2, train_micro_batch_size_per_gpu=2)))
    return path


def sweep(run_file: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the benchmark in one process, where torch cannot be imported."""
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, "--deepspeed_config", str(run_file), *options],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=TIME_LIMIT_SECONDS,
    )  # fmt: skip


def test_a_dry_run_plans_for_the_processes_of_the_file(run_file: Path) -> None:
    finished = sweep(run_file, "--global-batch-sizes", "8,4", "--dry-run")
    assert finished.returncode == 0, finished.stderr
    rows = [line.split() for line in finished.stdout.splitlines() if line.strip()[:1].isdigit()]
    assert [row[:4] for row in rows] == [["4", "2", "of", "2"], ["8", "4", "of", "2"]]
    assert "33.3%" in rows[0] and "20.0%" in rows[1]
    assert "recommended start of a ramp: unknown" in finished.stdout


def test_a_dry_run_predicts_from_a_calibration(run_file: Path, tmp_path: Path) -> None:
    calibration = tmp_path / "sweep.json"
    file_of(load_plan(run_file, None)[0]).write(calibration)
    finished = sweep(run_file, "--global-batch-sizes", "4,8", "--dry-run", "--calibration", str(calibration))
    assert finished.returncode == 0, finished.stderr
    assert "top predicted speed" in finished.stdout


@pytest.mark.parametrize("dry_run", [("--dry-run",), ()], ids=["dry", "launched"])
@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--global-batch-sizes", "4,5"), "global batch 5 is not a multiple of micro-batch size 2"),
        (("--global-batch-sizes", "4,6", "--micro-batch-sizes", "1,4"), "global batch 6 is not a multiple"),
        (("--global-batch-sizes", "4,four"), "must be whole numbers from 1"),
        (("--global-batch-sizes", "0,4"), "must be whole numbers from 1"),
        (("--global-batch-sizes", "4,4"), "given twice"),
        (("--global-batch-sizes", "4,8", "--share", "2"), "--share 2"),
        (("--global-batch-sizes", "4,8", "--rounds", "0"), "--rounds 0"),
    ],
)
def test_a_bad_request_is_one_message_and_exit_code_2(
    run_file: Path, options: tuple[str, ...], says: str, dry_run: tuple[str, ...]
) -> None:
    finished = sweep(run_file, *options, "--set", "megastable.pipeline.num_stages=1", *dry_run)
    assert finished.returncode == 2
    assert finished.stdout == ""
    assert finished.stderr.startswith("[megastable] error: ")
    assert finished.stderr.count("error") == 1
    assert says in finished.stderr


def test_files_that_exist_are_refused_before_anything_is_measured(run_file: Path, tmp_path: Path) -> None:
    (tmp_path / "sweep.html").write_text("an old page")
    for option, path in (("--json", run_file), ("--plot", tmp_path / "sweep")):
        finished = sweep(
            run_file, "--global-batch-sizes", "4,8", "--set", "megastable.pipeline.num_stages=1", option, str(path)
        )
        assert finished.returncode == 2
        assert "exists already" in finished.stderr
    assert (tmp_path / "sweep.html").read_text() == "an old page"
