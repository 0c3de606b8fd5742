"""Where a command's output leads changes neither its exit code nor makes a traceback."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megastable.cli.main import app
from megastable.core.scripts import Parser
from tests.unit.cli.watch_examples import write_config
from tests.unit.config.config_examples import RUN_FILES

COMMAND = f"{sys.executable} -c 'from megastable.cli.main import main; main()'"
TRAIN = f"{sys.executable} {RUN_FILES.parent / 'launch' / 'train.py'}"
BLOOM = RUN_FILES / "bloom_176b.json"
COMMANDS = {
    "check json": f"{COMMAND} check {BLOOM} --json",
    "plan": f"{COMMAND} plan {BLOOM} --devices 384",
    "help": f"{COMMAND} --help",
    "watch": f"{COMMAND} watch RUN --once",
    "help of a launch": f"{TRAIN} --help",
}
each_command = pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
# Python's buffer fails when it is flushed at the end, and without it every single write does.
each_buffering = pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])


def finished(shell: str, run: Path, unbuffered: str = "") -> subprocess.CompletedProcess[str]:
    shell = shell.replace("RUN", str(run))
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    return subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=60, env=environment)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    write_config(folder)
    return folder


@each_buffering
@each_command
def test_a_reader_that_leaves_at_once_and_closed_streams_change_nothing(
    command: str, unbuffered: str, run: Path
) -> None:
    """Three ways in one shell: each prints its exit code to standard error, where nothing else may stand."""
    result = finished(
        f"{command} | true; echo ${{PIPESTATUS[0]}} >&2; {command} >&-; echo $? >&2; {command} >&- 2>&-; echo $? >&2",
        run,
        unbuffered,
    )
    assert result.stderr.split() == ["0", "0", "0"]


@each_command
def test_an_encoding_without_the_characters_loses_them_alone(command: str, run: Path) -> None:
    result = finished(f"PYTHONIOENCODING=ascii {command}", run)
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
@each_buffering
@each_command
def test_a_full_disk_is_one_message(command: str, unbuffered: str, run: Path) -> None:
    result = finished(f"{command} >/dev/full", run, unbuffered)
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: the output cannot be written: No space left")


def scripts() -> list[Path]:
    """List the files that are run as a program."""
    root = RUN_FILES.parent
    paths = [*root.glob("benchmarks/**/*.py"), *root.glob("megastable/**/*.py"), *root.glob("launch/*.py")]
    return sorted(path for path in paths if 'if __name__ == "__main__"' in path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", scripts(), ids=lambda path: path.name)
def test_every_script_takes_care_of_its_streams_and_shows_what_it_refuses(path: Path) -> None:
    """Most of them load torch, which takes longer than what is looked for."""
    called = {
        ast.unparse(node.func) for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Call)
    }
    assert "run_script" in called or "parse_arguments" in called
    assert "argparse.ArgumentParser" not in called


HOSTILE_WORDS = ["--\x1b[31mx", "-\u202ex", "\x1b[2J\u202e", "\x9b31m", "a\nb", "--json=\x1b]0;x\x07"]


@pytest.mark.parametrize("word", HOSTILE_WORDS)
@pytest.mark.parametrize("command", [[], ["schema"], ["check"], ["plan"], ["watch"], ["plot"]])
def test_what_was_typed_is_shown_and_not_obeyed(command: list[str], word: str) -> None:
    for line in ([*command, word], [*command, "a", "b", "c", word]):
        result = CliRunner(env={"COLUMNS": "200"}).invoke(app, line)
        assert result.exit_code != 0
        assert all(shown.isprintable() for shown in result.output.split("\n"))


def test_a_scripts_parser_shows_what_was_typed(capsys: pytest.CaptureFixture[str]) -> None:
    parser = Parser()
    parser.add_argument("--seed", type=int)
    for word in HOSTILE_WORDS:
        for line in ([word], ["--seed", word], [f"--seed={word}"]):
            with pytest.raises(SystemExit) as end:
                parser.parse_args(line)
            assert end.value.code == 2
    assert all(shown.isprintable() for shown in capsys.readouterr().err.split("\n"))
