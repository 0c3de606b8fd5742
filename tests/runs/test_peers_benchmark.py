"""The comparison with other engines: all candidates learn the same, and a measurement writes what it should."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.launches import TORCHRUN
from tests.support.ranks import run_bounded

CANDIDATES = ("megastable", "DeepSpeed", "DeepSpeed fused", "torch 1F1B", "torch ZBV", "one process")
TINY = ["benchmarks/peers/run.py", "--layers", "4", "--hidden", "64", "--seq-length", "32"]


def test_loss_curves_of_all_candidates_are_equal() -> None:
    """Across a change of the number of micro-batches; the script itself fails beyond its tolerance."""
    process = run_bounded([*TORCHRUN, *TINY, "--check", "--rounds", "4"], 240)
    assert process.returncode == 0, process.stdout[-4000:]
    for name in CANDIDATES[:-1]:
        assert f"  {name:16} " in process.stdout, process.stdout[-4000:]


def test_a_measurement_has_every_candidate_and_overwrites_nothing(tmp_path: Path) -> None:
    output = tmp_path / "times.json"
    command = [*TORCHRUN, *TINY, "--batches", "2,4", "--rounds", "2", "--json", str(output)]
    process = run_bounded(command, 240)
    assert process.returncode == 0, process.stdout[-4000:]
    result = json.loads(output.read_text())
    assert [(row["round"], row["num_micro_batches"]) for row in result["rows"]] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    assert result["refused"].keys() == {"torch 1F1B"}
    for row in result["rows"]:
        absent = {"torch 1F1B"} if row["num_micro_batches"] < 2 else set()
        assert row["seconds"].keys() == set(CANDIDATES) - absent and min(row["seconds"].values()) > 0
    assert output.with_suffix(".md").read_text() in process.stdout.replace("\r\n", "\n")
    assert output.with_suffix(".png").stat().st_size > 0

    again = run_bounded(command, 60)
    assert again.returncode != 0 and "is there already" in again.stdout
    assert json.loads(output.read_text()) == result
