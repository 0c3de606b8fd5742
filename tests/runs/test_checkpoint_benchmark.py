"""The benchmark of saves on two real processes, with sizes that take seconds."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.scripts import run_script

COMMAND = ["benchmarks/checkpoint.py", "--layers", "4", "--hidden", "64", "--rounds", "2"]


def test_it_measures_in_turns_and_leaves_only_its_file(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    found = tmp_path / "saves.json"
    command = [*COMMAND, "--folder", str(disk), "--json", str(found)]
    finished = run_script(command, world_size=2, timeout_seconds=240)
    assert finished.exit_codes == [0, 0], finished.output[-4000:]
    assert finished.output.count("stall / plain copy") == 1  # rank 0 alone
    assert list(disk.iterdir()) == []

    measured = json.loads(found.read_text())
    assert measured["num_processes"] == 2
    assert len(measured["rounds"]) == len(measured["stalls"]) == len(measured["rates"]) == 2
    for row in measured["rounds"]:
        assert all(seconds > 0 for seconds in row.values())
        assert row["asynchronous_stall"] < row["asynchronous"]
    # Beside the tensors there are the manifest and the random generators.
    assert 12 <= measured["checkpoint_bytes"] / measured["num_parameters"] < 12.5

    refused = run_script(command)
    assert refused.exit_codes == [2] and "exists already" in refused.output
