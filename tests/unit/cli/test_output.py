"""Where a command's output leads changes neither its exit code nor makes a traceback."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megastable.cli.main import app
from tests.unit.cli.watch_examples import write_config
from tests.unit.config.config_examples import RUN_FILES

COMMAND = f"{sys.executable} -c 'from megastable.cli.main import main; main()'"
BLOOM = RUN_FILES / "bloom_176b.json"
COMMANDS = {
    "check json": f"check {BLOOM} --json",
    "plan": f"plan {BLOOM} --devices 384",
    "help": "--help",
    "watch": "watch RUN --once",
}
each_command = pytest.mark.parametrize("arguments", COMMANDS.values(), ids=COMMANDS)


def finished(shell: str, run: Path) -> subprocess.CompletedProcess[str]:
    shell = shell.replace("RUN", str(run))
    return subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=60)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    write_config(folder)
    return folder


@each_command
def test_a_reader_that_leaves_at_once_and_closed_streams_change_nothing(arguments: str, run: Path) -> None:
    """Three ways in one shell: each prints its exit code to standard error, where nothing else may stand."""
    result = finished(
        f"{COMMAND} {arguments} | true; echo ${{PIPESTATUS[0]}} >&2; "
        f"{COMMAND} {arguments} >&-; echo $? >&2; "
        f"{COMMAND} {arguments} >&- 2>&-; echo $? >&2",
        run,
    )
    assert result.stderr.split() == ["0", "0", "0"]


@each_command
def test_an_encoding_without_the_characters_loses_them_alone(arguments: str, run: Path) -> None:
    result = finished(f"PYTHONIOENCODING=ascii {COMMAND} {arguments}", run)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.isascii()


HOSTILE = "\x1b[2J\x1b[31m \u202e [red]"


def test_a_run_folder_is_shown_and_not_obeyed(tmp_path: Path) -> None:
    folder = tmp_path / f"run{HOSTILE}"
    folder.mkdir()
    write_config(folder)
    row = {"step": 1, "loss": 1.0, "consumed_samples": 8, "layers": {HOSTILE: {"grad_norm": 1.0}}}
    event = {"step": 1, "kind": HOSTILE, "text": HOSTILE}
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    (folder / "events.jsonl").write_text(json.dumps(event) + "\n", encoding="utf-8")
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["watch", str(folder), "--once"])
    assert result.exit_code == 0
    assert all(line.isprintable() for line in result.output.splitlines())
    assert r"\x1b[2J\x1b[31m \u202e [red]" in result.output


def test_a_run_file_is_shown_and_not_obeyed_and_json_is_faithful(tmp_path: Path) -> None:
    path = tmp_path / f"{HOSTILE}.json"
    path.write_text(json.dumps({HOSTILE: HOSTILE}), encoding="utf-8")
    result = CliRunner().invoke(app, ["check", str(path)])
    assert result.exit_code == 1
    assert all(line.isprintable() for line in result.output.split("\n"))
    findings = json.loads(CliRunner().invoke(app, ["check", str(path), "--json"]).output)
    assert HOSTILE in [finding["key"] for finding in findings]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's full device")
@each_command
def test_a_full_disk_is_one_message(arguments: str, run: Path) -> None:
    result = finished(f"{COMMAND} {arguments} >/dev/full", run)
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: the output cannot be written: No space left")
