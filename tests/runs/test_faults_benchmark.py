"""Runs that are killed at random moments, inside saves too, go on on other layouts as if nothing had happened."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.support.ranks import run_bounded

SCRIPT = [sys.executable, "benchmarks/faults/run.py"]


@pytest.mark.parametrize(
    "num_rounds",
    [
        pytest.param(3, marks=pytest.mark.slow),
        pytest.param(12, marks=[pytest.mark.exhaustive, pytest.mark.timeout(1500)]),
    ],
)
def test_no_step_is_lost_or_wrong(tmp_path: Path, num_rounds: int) -> None:
    output = tmp_path / "faults.json"
    limits = ["--time-limit", str(2 * num_rounds), "--start-limit", "120"]
    words = ["--rounds", str(num_rounds), "--seed", "4", *limits, "--json", str(output)]
    finished = run_bounded([*SCRIPT, *words], 60 + 110 * num_rounds)
    assert finished.returncode == 0, finished.stdout
    result = json.loads(output.read_text())
    assert result["rounds"] == len(result["rows"]) == num_rounds
    assert result["kills"] > 0, "nobody was killed"
    assert (result["lost"], result["wrong"], result["failed_runs"]) == (0, 0, 0)
    assert 0 < result["largest_difference"] < 1e-5
    for row in result["rows"]:
        *killed, last = row["starts"]
        assert row["faults"] == [] and last["killed_rank"] is None
        assert all(start["killed_rank"] is not None and start["had_to_be_killed"] == 0 for start in killed)

    again = run_bounded([*SCRIPT, *words], 60)
    assert again.returncode == 2 and "is there already" in again.stdout, again.stdout
