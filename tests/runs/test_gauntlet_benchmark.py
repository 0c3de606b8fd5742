"""Faults that are put into real runs from outside are detected, named and recovered from."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.support.ranks import run_bounded

SCRIPT = [sys.executable, "benchmarks/gauntlet/run.py", "--alone"]


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["garbage_batch"]),
        pytest.param(["nan_weight", "tied_drift", "hot_lr"], marks=pytest.mark.slow),
        pytest.param(["changed_replica", "flipped_bit", "sigterm", "same_data_twice"], marks=pytest.mark.slow),
    ],
    ids=lambda names: names[0],
)
def test_a_fault_is_detected_named_and_recovered_from(tmp_path: Path, names: list[str]) -> None:
    output = tmp_path / "scores.json"
    finished = run_bounded([*SCRIPT, "--only", ",".join(names), "--json", str(output)], 100 * (len(names) + 1))
    assert finished.returncode == 0, finished.stdout
    rows = json.loads(output.read_text())
    assert [row["name"] for row in rows] == names
    for row in rows:
        required = {
            "name", "injected_step", "detected_step", "culprit_named", "recovered", "final_loss", "clean_final_loss",
        }  # fmt: skip
        assert required <= row.keys()
        assert row["passed"] and row["culprit_named"], row
        assert row["detected_step"] - row["injected_step"] <= 30, row
    table = output.with_suffix(".md").read_text()
    assert f"{len(names)} of {len(names)} scenarios" in table and table in finished.stdout


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--only", "nothing"], "nothing is no scenario; there are attention_overflow"),
        (["--start-limit", "0"], "above 0"),
    ],
)
def test_a_mistake_on_the_command_line_is_refused(words: list[str], says: str) -> None:
    finished = run_bounded([*SCRIPT, *words], 60)
    assert finished.returncode == 2 and says in " ".join(finished.stdout.split()), finished.stdout
