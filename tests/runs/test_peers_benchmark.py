"""The comparison with other engines: all candidates learn the same, and a measurement writes what it should."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.scripts import STARTS, Start, run_script

CANDIDATES = ("megastable", "DeepSpeed", "DeepSpeed fused", "torch 1F1B", "torch ZBV", "one process")
TOY = "toy"
TINY = ["benchmarks/peers/run.py", "--layers", "4", "--hidden", "64", "--seq-length", "32"]


def add_toy_engine() -> None:
    """Add a candidate as anybody would: how it is built, and its line."""
    from own_engine import Megastable
    from trainers import PEERS

    PEERS[TOY] = lambda settings, bounds: Megastable(settings)


def test_loss_curves_of_all_candidates_are_equal_and_of_one_that_is_added() -> None:
    """Across a change of the number of micro-batches; the script itself fails beyond its tolerance."""
    finished = run_script([*TINY, "--check", "--rounds", "4"], world_size=2, first=add_toy_engine)
    assert finished.exit_codes == [0, 0], finished.output[-4000:]
    for name in (*CANDIDATES[:-1], TOY):
        assert f"  {name:16} " in finished.outputs[0], finished.output[-4000:]


@pytest.mark.parametrize("start", STARTS)
def test_a_measurement_has_every_candidate_and_overwrites_nothing(tmp_path: Path, start: Start) -> None:
    output = tmp_path / "times.json"
    command = [*TINY, "--batches", "2,4", "--rounds", "2", "--json", str(output)]
    exit_code, printed = start("torchrun", command)
    assert exit_code == 0, printed[-4000:]
    result = json.loads(output.read_text())
    assert [(row["round"], row["num_micro_batches"]) for row in result["rows"]] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    assert result["refused"].keys() == {"torch 1F1B"}
    for row in result["rows"]:
        absent = {"torch 1F1B"} if row["num_micro_batches"] < 2 else set()
        assert row["seconds"].keys() == set(CANDIDATES) - absent and min(row["seconds"].values()) > 0
    assert output.with_suffix(".md").read_text() in printed.replace("\r\n", "\n")
    assert output.with_suffix(".png").stat().st_size > 0

    # One rank of two: what is refused after the ranks have met would wait for the other one.
    again = run_script(command, environment={"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"})
    assert again.exit_codes == [2] and "is there already" in again.output, again.output
    assert json.loads(output.read_text()) == result
