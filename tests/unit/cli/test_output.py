"""Where a command's output leads changes neither its exit code nor makes a traceback."""

import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's full device")
@each_command
def test_a_full_disk_is_one_message(arguments: str, run: Path) -> None:
    result = finished(f"{COMMAND} {arguments} >/dev/full", run)
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: the output cannot be written: No space left")
