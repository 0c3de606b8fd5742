"""``megastable check``: lines for people, JSON for programs, and the exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from megastable.cli.main import app
from megastable.planning.preflight.preflight import preflight
from megastable.planning.preflight.review import Finding
from megastable.training.host import look_at_text
from tests.unit.cli.test_cli import exit_of_main
from tests.unit.planning.preflight_cases import P100, SOUND

REPOSITORY = Path(__file__).parents[3]
TIME_LIMIT_SECONDS = 60
UNSAFE = {"bf16": {}, "data_types": {}, "fp16": {"enabled": True}, "gradient_clipping": 0}


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same on every machine."""
    monkeypatch.setattr("megastable.cli.main.installed_gpus", lambda: ())


def run_file(folder: Path, **sections: Any) -> str:
    """The sound run with top-level sections replaced, as a file."""
    path = folder / "run.json"
    path.write_text(json.dumps({**SOUND, **sections}))
    return str(path)


def check(*arguments: str) -> tuple[int, str]:
    """Exit code and output of the command."""
    result = CliRunner().invoke(app, ["check", *arguments])
    return result.exit_code, result.stdout


def test_a_sound_run_has_nothing_to_say_and_exit_code_0(tmp_path: Path) -> None:
    path = run_file(tmp_path)
    assert check(path, "--world-size", "16") == (0, f"{path}: nothing to say\n")
    assert check(path, "--world-size", "16", "--json") == (0, "[]\n")


def test_json_is_a_list_of_the_findings_and_nothing_else(tmp_path: Path) -> None:
    path = run_file(tmp_path, **UNSAFE)
    exit_code, output = check(path, "--json", "--world-size", "16")
    assert exit_code == 1
    assert [Finding(**entry) for entry in json.loads(output)] == preflight(Path(path), 16, (), look_at_text)


def test_faults_of_the_file_are_findings_in_json_too(tmp_path: Path) -> None:
    exit_code, output = check(run_file(tmp_path, zero_optimization={"stage": 0}, train_batch_size=8), "--json")
    assert exit_code == 1
    assert {entry["key"] for entry in json.loads(output)} == {"zero_optimization.stage", "train_batch_size"}
    assert {entry["level"] for entry in json.loads(output)} == {"error"}


def test_every_finding_is_shown_whole_and_counted(tmp_path: Path) -> None:
    path = run_file(tmp_path, **UNSAFE)
    findings = preflight(Path(path), None, (), look_at_text)
    assert [finding.level for finding in findings] == ["error", "note"]
    exit_code, output = check(path)
    assert exit_code == 1
    for finding in findings:
        assert f"{finding.level} {finding.key}\n  {finding.message}\n  instead: {finding.suggestion}\n" in output
    assert output.endswith(f"{path}: 1 error, 1 note\n")


def test_warnings_alone_are_exit_code_0(tmp_path: Path) -> None:
    exit_code, output = check(run_file(tmp_path, gradient_clipping=5), "--world-size", "16")
    assert exit_code == 0
    assert output.endswith("1 warning\n")


def test_the_gpus_of_the_machine_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = run_file(tmp_path, **UNSAFE)
    assert P100.name not in check(path)[1]
    monkeypatch.setattr("megastable.cli.main.installed_gpus", lambda: (P100,))
    assert P100.name in check(path)[1]


@pytest.mark.parametrize("options", [[], ["--json"]], ids=["lines", "json"])
def test_a_file_that_cannot_be_read_is_one_message_and_exit_code_2(
    tmp_path: Path, options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_of_main(monkeypatch, "check", str(tmp_path / "missing.json"), *options) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"error: {tmp_path / 'missing.json'}")


@pytest.mark.parametrize("size", ["0", "-1", "two"])
def test_a_world_size_that_is_no_number_of_processes_is_exit_code_2(tmp_path: Path, size: str) -> None:
    assert check(run_file(tmp_path), "--world-size", size)[0] == 2


def test_the_help_says_what_the_levels_and_exit_codes_mean() -> None:
    _, output = check("--help")
    words = " ".join(output.split())
    assert all(word in words for word in ("--world-size", "--json", "error:", "warning:", "note:", "Exit code 1"))


def test_it_needs_no_torch_and_ends_within_seconds() -> None:
    """Also where it looks at the text, for which the data room loads numpy."""
    script = (
        "import sys; sys.modules.update(torch=None, deepspeed=None); "
        "sys.argv = ['megastable', 'check', 'ds_configs/quickstart.json']; "
        "from megastable.cli.main import main; main()"
    )
    finished = subprocess.run(
        [sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, timeout=TIME_LIMIT_SECONDS
    )
    assert finished.returncode == 0, finished.stderr
    assert "notes" in finished.stdout
