"""``megastable checkpoints``: what lies in a run's folder, for people and programs, whatever is wrong with it."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from megastable.checkpoints.folder import (
    ABANDONED_SUFFIX,
    DAMAGED_SUFFIX,
    DELETING_SUFFIX,
    PARTIAL_SUFFIX,
    SUPERSEDED_SUFFIX,
    kind_of,
)
from megastable.checkpoints.manifest import MANIFEST_NAME
from megastable.cli.checkpoints import KINDS
from megastable.cli.main import app
from megastable.core.run_paths import RunPaths
from tests.unit.checkpoints.checkpoint_examples import FIRST, SECOND, make_checkpoint, make_partial
from tests.unit.checkpoints.damages import OF_THE_CONTENT, OF_THE_FILES, OF_THE_MANIFEST, Damage, flipped
from tests.unit.cli.test_cli import exit_of_main

TIME_LIMIT_SECONDS = 60
# All damages of a manifest come out of one function; a few of each part will do here.
SOME_DAMAGES = dict(list(OF_THE_MANIFEST.items())[::6]) | OF_THE_FILES | OF_THE_CONTENT
every_kind_of_damage = pytest.mark.parametrize(
    "damage", [pytest.param(damage, id=name) for name, (damage, _) in SOME_DAMAGES.items()]
)


def checkpoints(*arguments: str | Path) -> tuple[int, str]:
    """Exit code and output of the command."""
    result = CliRunner().invoke(app, ["checkpoints", *map(str, arguments)], catch_exceptions=False)
    return result.exit_code, result.stdout


def document(*arguments: str | Path) -> dict[str, Any]:
    """What the command says as JSON."""
    values: dict[str, Any] = json.loads(checkpoints(*arguments, "--json")[1])
    return values


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run with two checkpoints, and all that may lie beside them."""
    folder = tmp_path / "run"
    checkpoints = RunPaths(folder).checkpoints
    make_checkpoint(checkpoints, 10, loss=5.25)
    make_checkpoint(checkpoints, 20, loss=float("nan"), eval_loss=5.125)
    for step, suffix in {5: DELETING_SUFFIX, 15: DAMAGED_SUFFIX, 20: SUPERSEDED_SUFFIX}.items():
        left = make_partial(checkpoints, step)
        left.rename(left.with_suffix(suffix))
    (checkpoints / f"step_00000005{DELETING_SUFFIX}" / MANIFEST_NAME).unlink()
    make_partial(checkpoints, 30)
    (checkpoints / "notes.txt").write_text("mine")
    return folder


def test_every_checkpoint_is_a_line_with_what_it_holds(run_dir: Path) -> None:
    exit_code, output = checkpoints(run_dir)
    assert exit_code == 0
    lines = [line.split() for line in output.splitlines()]
    assert [line[0] for line in lines[2:-1]] == [
        "step_00000005.deleting",
        "step_00000010",
        "step_00000015.damaged",
        "step_00000020",
        "step_00000020.superseded",
        "step_00000030.partial",
    ]
    assert lines[3][:9] == ["step_00000010", "10", "80", "5.2500", "-", "2", "x", "1", "x"]
    assert lines[3][-1] == "complete"
    assert lines[5][3:5] == ["nan", "5.1250"]
    assert output.endswith("2 complete; --resume goes on from step_00000020\n")


def test_json_is_one_document(run_dir: Path) -> None:
    values = document(run_dir)
    assert values["newest_complete"] == "step_00000020"
    kinds = {entry["name"]: entry["kind"] for entry in values["checkpoints"]}
    assert list(kinds.values()) == ["deleting", "checkpoint", "damaged", "checkpoint", "superseded", "partial"]
    first, second = (entry for entry in values["checkpoints"] if entry["kind"] == "checkpoint")
    assert 0 <= first.pop("age_seconds") < TIME_LIMIT_SECONDS
    assert first.pop("written_unix") > 0
    assert first.pop("bytes") == sum(path.stat().st_size for path in (run_dir / "checkpoints/step_00000010").iterdir())
    assert first == {
        "name": "step_00000010",
        "kind": "checkpoint",
        "step": 10,
        "complete": True,
        "verified": False,
        "faults": [],
        "consumed_samples": 80,
        "consumed_tokens": 1280,
        "loss": 5.25,
        "eval_loss": None,
        "layout": {"num_stages": 2, "data_parallel_size": 1, "tensor_parallel_size": 1},
    }
    assert second["loss"] is None  # JSON has no word for what is not finite
    assert second["eval_loss"] == 5.125


@every_kind_of_damage
def test_a_damage_is_a_sentence_and_verification_ends_with_1(tmp_path: Path, damage: Damage) -> None:
    run_dir = tmp_path / "run"
    make_checkpoint(run_dir / "checkpoints", 9)
    damaged = make_checkpoint(run_dir / "checkpoints", 10)
    damage(damaged)
    exit_code, output = checkpoints(run_dir, "--verify")
    assert exit_code == 1
    assert f"{damaged} is " in output
    assert "not whole" in output
    assert output.endswith("1 complete; --resume goes on from step_00000009\n")
    (whole, other) = document(run_dir, "--verify")["checkpoints"]
    assert (whole["complete"], whole["verified"], whole["faults"]) == (True, True, [])
    assert not other["complete"]
    assert len(other["faults"]) == 1


def test_every_fault_is_listed_and_leftovers_have_none(run_dir: Path) -> None:
    assert checkpoints(run_dir, "--verify")[0] == 0
    for name in (FIRST, SECOND):
        flipped(name, 3)(run_dir / "checkpoints/step_00000010")
    exit_code, output = checkpoints(run_dir, "--verify")
    assert exit_code == 1
    assert output.count(" is damaged: ") == 2
    assert [entry["verified"] for entry in document(run_dir, "--verify")["checkpoints"]].count(True) == 2


def test_the_folder_of_checkpoints_and_one_of_them_may_be_named(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run_dir / "checkpoints"
    names = [entry["name"] for entry in document(run_dir)["checkpoints"]]
    assert [entry["name"] for entry in document(folder)["checkpoints"]] == names
    (entry,) = document(folder / "step_00000010", "--verify")["checkpoints"]
    assert (entry["name"], entry["verified"]) == ("step_00000010", True)
    flipped(FIRST, 0)(folder / "step_00000030.partial")
    assert checkpoints(folder / "step_00000030.partial", "--verify")[0] == 1
    copy = (folder / "step_00000010").rename(run_dir / "best")
    (entry,) = document(copy)["checkpoints"]
    assert (entry["kind"], entry["complete"], entry["consumed_samples"]) == ("other", True, 80)
    monkeypatch.chdir(copy)
    assert checkpoints(".", "--verify")[0] == 0


@pytest.mark.parametrize(
    "suffix", [ABANDONED_SUFFIX, DAMAGED_SUFFIX, DELETING_SUFFIX, PARTIAL_SUFFIX, SUPERSEDED_SUFFIX]
)
def test_what_a_run_has_left_is_listed_by_its_kind(tmp_path: Path, suffix: str) -> None:
    make_checkpoint(tmp_path, 10)
    left = make_checkpoint(tmp_path, 20).rename(tmp_path / f"step_00000020{suffix}")
    exit_code, output = checkpoints(tmp_path)
    assert exit_code == 0 and KINDS[kind_of(left)] in output, output


@pytest.mark.parametrize("left", ["a config", "an empty folder of checkpoints", "a folder of that name"])
def test_a_run_without_checkpoints_is_said(tmp_path: Path, left: str) -> None:
    named = tmp_path
    if left == "a config":
        (tmp_path / "config.json").write_text("{}")
    else:
        (tmp_path / "checkpoints").mkdir()
    if left == "a folder of that name":
        named = tmp_path / "checkpoints"
    assert checkpoints(named) == (0, f"{named} has no checkpoints\n")
    assert document(named) == {"path": str(named), "newest_complete": None, "checkpoints": []}


@pytest.mark.parametrize("name", ["missing", "file", "empty", "\x1b[2J"])
def test_what_is_no_run_folder_is_one_message(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    assert exit_of_main(monkeypatch, "checkpoints", str(tmp_path / name)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("error: ")
    assert "\x1b" not in captured.err


def test_no_name_is_obeyed_by_a_terminal(tmp_path: Path) -> None:
    folder = tmp_path / "\x1b[31mrun" / "checkpoints"
    make_checkpoint(folder, 10)
    flipped(FIRST, 0)(folder / "step_00000010")
    (folder / "step_\x1b[2J\n").write_text("")
    (folder / "step_[red]").mkdir()
    (folder / os.fsdecode(b"step_\xff")).mkdir()
    for option in ("--verify", "--json"):
        exit_code, output = checkpoints(folder.parent, option)
        assert exit_code == (option == "--verify")
        assert output.replace("\n", "").isprintable()
        assert "[red]" in output


def test_nothing_is_written(run_dir: Path) -> None:
    def tree() -> list[tuple[str, int]]:
        return [(str(path), path.stat().st_mtime_ns) for path in sorted(run_dir.rglob("*"))]

    before = tree()
    checkpoints(run_dir, "--verify")
    assert tree() == before


def test_progress_is_shown_on_a_terminal_and_not_in_the_output(run_dir: Path) -> None:
    terminal, other_end = pty.openpty()
    script = "from megastable.cli.main import main; main()"
    finished = subprocess.run(
        [sys.executable, "-c", script, "checkpoints", str(run_dir), "--verify", "--json"],
        stdout=subprocess.PIPE, stderr=other_end, timeout=TIME_LIMIT_SECONDS, env={**os.environ, "TERM": "xterm"},
    )  # fmt: skip
    os.close(other_end)
    shown = os.read(terminal, 65536).decode()
    os.close(terminal)
    assert finished.returncode == 0
    assert json.loads(finished.stdout)["newest_complete"] == "step_00000020"
    assert "reading" in shown
