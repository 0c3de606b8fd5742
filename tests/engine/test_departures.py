"""Every departure from DeepSpeed and torch: its originals are as recorded, and its test is there."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest

from megastable.engine.departures import DEPARTURES
from megastable.engine.upstream import Departure, changes, source_hash

REPOSITORY = Path(__file__).parents[2]
every_departure = pytest.mark.parametrize("departure", DEPARTURES, ids=lambda departure: departure.name)


@every_departure
def test_the_originals_are_as_recorded(departure: Departure) -> None:
    assert list(changes(departure)) == []


@every_departure
def test_the_test_that_fails_without_it_is_there(departure: Departure) -> None:
    path, function = departure.test.split("::")
    tree = ast.parse((REPOSITORY / path).read_text(encoding="utf-8"))
    assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@every_departure
def test_a_departure_says_what_it_is_about(departure: Departure) -> None:
    module, what = departure.name.split(": ")
    assert what and departure.symptom and departure.cause
    assert (REPOSITORY / "megastable" / "engine" / f"{module.removeprefix('engine/')}.py").exists()


def test_no_departure_has_the_name_of_another() -> None:
    assert len({departure.name for departure in DEPARTURES}) == len(DEPARTURES)


def test_a_changed_original_is_reported_with_hash_file_and_symptom() -> None:
    name = "deepspeed.runtime.pipe.engine:PipelineEngine._exec_schedule"
    departure = replace(DEPARTURES[0], upstream={name: "0", "deepspeed.runtime:no_such_function": "0"})
    changed, gone = changes(departure)
    for part in (source_hash(name), "pipe/engine.py", departure.name, departure.symptom):
        assert part in changed
    assert "no_such_function is not there any more" in gone
