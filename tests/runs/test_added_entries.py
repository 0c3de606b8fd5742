"""A new entry takes a definition and a line of its registry: `check`, `plan`, three steps and a resume then work."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megastable.cli.main import app
from megastable.config import ConfigError, load_run_file
from megastable.core.errors import UserError
from megastable.planning.micro_batches import load_plan
from tests.support.launches import metrics, write_run_file
from tests.support.ranks import REPOSITORY, run_processes
from tests.support.scripts import train_and_resume
from tests.support.toy_entries import TOY_ENTRIES, ToyEntry, add_and_look, add_rule

NUM_STEPS = 3
WITH_A_TEST_OF_ITS_OWN = {
    "engine to compare with",
    "fault of the gauntlet",
}  # test_peers_ and test_gauntlet_benchmark.py


def write_toy_run(folder: Path, toy: ToyEntry) -> Path:
    """Write a tiny run of three steps that uses the entry."""
    path = write_run_file(folder, megastable__checkpoint__save_interval=1)
    settings = json.loads(path.read_text())
    stages, tensor_ranks = toy.layout
    keys = {
        "megastable.training.total_steps": NUM_STEPS,
        "megastable.pipeline.num_stages": stages,
        "megastable.tensor_parallel.size": tensor_ranks,
        **toy.keys,
    }
    for key, value in keys.items():
        *parents, last = key.split(".")
        section = settings
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
        if value is None:
            del section[last]
    path.write_text(json.dumps(settings))
    return path


def use_commands(name: str, run_file: Path) -> None:
    """Add the entry in this process, and run both commands on the file that uses it."""
    toy = TOY_ENTRIES[name]
    toy.add()
    for command, options, expected in (
        (["check", str(run_file), "--world-size", str(toy.world_size)], (), toy.check_says),
        (["plan", str(run_file), "--devices", str(toy.world_size)], toy.plan_options, toy.plan_says),
    ):
        result = CliRunner().invoke(app, [*command, *options])
        assert result.exit_code == 0, f"{command[0]} of {name}: {result.output} {result.exception!r}"
        assert expected in " ".join(result.output.split()), f"{command[0]} of {name}: {result.output}"


def test_every_row_of_the_table_has_a_toy() -> None:
    """CONTRIBUTING's table of what can be added, and nothing that is not in it but the layer of the text below it."""
    text = (REPOSITORY / "CONTRIBUTING.md").read_text().split("## Adding a thing")[1].split("\n## ")[0]
    rows = [row.split("|")[1].strip() for row in re.findall(r"^\|.*\|$", text, re.MULTILINE)[2:]]
    names = {
        "way to cut the layers into stages": "way to cut",
        "rule between keys of a run file": "rule of a run file",
    }
    found = {names.get(row, row) for row in rows} | {"split layer"}
    assert found == {*TOY_ENTRIES, *WITH_A_TEST_OF_ITS_OWN}


@pytest.mark.parametrize("name", TOY_ENTRIES)
def test_an_added_entry_is_checked_planned_trained_and_resumed(tmp_path: Path, name: str) -> None:
    toy = TOY_ENTRIES[name]
    run_file = write_toy_run(tmp_path, toy)
    assert run_processes([(use_commands, (name, run_file))], timeout_seconds=60) == [0]

    whole, resumed = train_and_resume(
        run_file, tmp_path, 2, toy.world_size, first=add_and_look, name=name, planned_file=str(run_file)
    )
    rows = metrics(whole)
    assert [row["step"] for row in rows] == list(range(1, NUM_STEPS + 1))
    assert all(row[toy.metric] is not None for row in rows)
    assert [row["loss"] for row in metrics(resumed)] == [row["loss"] for row in rows]


def refuse_thirteen_layers(run_file: Path) -> None:
    """Add the toy rule, and break it."""
    add_rule()
    with pytest.raises(ConfigError, match="must not be 13"):
        load_run_file(run_file, ["megastable.model.num_layers=13"])


def test_an_added_rule_is_applied(tmp_path: Path) -> None:
    run_file = write_toy_run(tmp_path, TOY_ENTRIES["rule of a run file"])
    assert load_run_file(run_file, ["megastable.model.num_layers=13"])
    assert run_processes([(refuse_thirteen_layers, (run_file,))], timeout_seconds=60) == [0]


@pytest.mark.parametrize("name", [name for name, toy in TOY_ENTRIES.items() if toy.keys])
def test_without_its_entry_the_run_file_is_refused(tmp_path: Path, name: str) -> None:
    toy = TOY_ENTRIES[name]
    with pytest.raises(UserError, match=f"(?i){re.escape(toy.refused_with)}"):
        load_plan(write_toy_run(tmp_path, toy), toy.world_size)
