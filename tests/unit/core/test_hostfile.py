"""A hostfile that deepspeed could not read, found in the command lines of real parent processes."""

import subprocess
import sys
from pathlib import Path

import pytest

from megastable.core.launch import check_hostfile

REPOSITORY = Path(__file__).parents[3]
TIME_LIMIT_SECONDS = 30
# Starts itself again with one generation fewer and the last arguments dropped, then the process that looks for them.
GENERATION = """
import subprocess, sys
generations = int(sys.argv[1])
command = ["-c", sys.orig_argv[sys.orig_argv.index("-c") + 1], str(generations - 1)] if generations else CHILD
sys.exit(subprocess.run([sys.executable, "-S", *command], timeout=20).returncode)
"""
CHILD = """
from megastable.core.errors import UserError
from megastable.core.launch import check_hostfile
try:
    check_hostfile()
    print("accepted")
except UserError as error:
    print("refused:", error)
"""

pytestmark = pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="needs Linux's /proc")


def child_under(arguments: list[str], generations_between: int = 0) -> str:
    """Return what a process prints whose ancestor's command line ends with ``arguments``."""
    script = GENERATION.replace("CHILD", repr(["-c", CHILD]))
    finished = subprocess.run(
        [sys.executable, "-S", "-c", script, str(generations_between), *arguments],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=TIME_LIMIT_SECONDS,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.strip()


def test_a_process_without_a_launcher_passes() -> None:
    check_hostfile()


@pytest.mark.parametrize("generations_between", [0, 1, 2])
def test_a_missing_hostfile_is_refused_from_any_depth_of_launchers(tmp_path: Path, generations_between: int) -> None:
    """train.py <- launcher.launch <- deepspeed, and a shell between them."""
    missing = str(tmp_path / "hostfil")
    said = child_under(["deepspeed", "--hostfile", missing, "launch/train.py"], generations_between)
    assert said.startswith("refused:")
    assert f"--hostfile {missing}" in said


@pytest.mark.parametrize("spelling", [["--hostfile", "{}"], ["--hostfile={}"], ["-H", "{}"]])
def test_every_spelling_of_the_option(tmp_path: Path, spelling: list[str]) -> None:
    present = tmp_path / "hostfile"
    words = [word.format(present) for word in spelling]
    assert child_under(["deepspeed", "--num_gpus", "2", *words, "launch/train.py"]).startswith("refused:")
    present.write_text("node1 slots=2\n")
    assert child_under(["deepspeed", "--num_gpus", "2", *words, "launch/train.py"]) == "accepted"


def test_a_folder_is_no_hostfile(tmp_path: Path) -> None:
    assert child_under(["deepspeed", "--hostfile", str(tmp_path), "launch/train.py"]).startswith("refused:")


def test_the_option_of_another_program_is_not_deepspeeds() -> None:
    assert child_under(["ansible", "--hostfile", "/no/such/file"]) == "accepted"


def test_deepspeed_without_a_hostfile_passes() -> None:
    assert child_under(["deepspeed", "--num_gpus", "2", "launch/train.py"]) == "accepted"
    assert child_under(["deepspeed", "--hostfile"]) == "accepted"


@pytest.mark.parametrize(
    "command",
    [
        ["sudo", "-H", "deepspeed", "--num_gpus", "2", "launch/train.py"],
        ["mpirun", "-H", "node1,node2", "python", "launch/train.py", "--deepspeed_config", "x.json"],
    ],
    ids=["sudo -H", "mpirun -H"],
)
def test_another_programs_option_is_not_deepspeeds_either_where_deepspeed_runs_below_it(command: list[str]) -> None:
    assert child_under(command) == "accepted"


def test_a_process_that_has_ended_is_no_error() -> None:
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    process.wait(timeout=TIME_LIMIT_SECONDS)
    check_hostfile(process.pid)
