"""A hostfile that deepspeed could not read, in the command lines of its processes."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.core.errors import UserError
from megastable.engine.hostfile import check_hostfile, hostfile_asked_for

SCRIPT = ["launch/train.py", "--deepspeed_config", "x.json", "--hostfile", "not-the-launchers"]
STARTS = [
    ["python3", "/usr/bin/deepspeed"],
    ["python3", "/usr/bin/ds"],
    ["python3", "/usr/bin/deepspeed.pt"],
    ["python3", "-u", "-W", "ignore", "-m", "deepspeed.launcher.runner"],
    ["python3", "/site-packages/deepspeed/launcher/runner.py"],
    ["python3", "-m", "coverage", "run", "-m", "deepspeed.launcher.runner"],
    ["python3", "-c", "from deepspeed.launcher.runner import main; main()"],
]
SPELLINGS = ["--hostfile {}", "--hostfile={}", "--hostf {}", "--ho={}", "-H {}", "-H{}", "-H={}"]
OTHER_OPTIONS = [[], ["--num_gpus", "2"], ["--num_gpus=2", "--master_port", "4000"], ["-q"], ["--no_local_rank"]]


def launcher_words(machines: list[str]) -> list[str]:
    """Return the command line of DeepSpeed's launcher of one node."""
    info = base64.urlsafe_b64encode(json.dumps({name: [0, 1] for name in machines}).encode()).decode()
    return ["python3", "-u", "-m", "deepspeed.launcher.launch", f"--world_info={info}", "--log_level=info", *SCRIPT]


@settings(max_examples=60, deadline=None)
@given(
    start=st.sampled_from(STARTS),
    before=st.sampled_from(OTHER_OPTIONS),
    spelling=st.sampled_from(SPELLINGS),
    after=st.sampled_from(OTHER_OPTIONS),
    path=st.sampled_from(["hosts", "/no/such/hosts", "a b", "hosts=2"]),
)
def test_every_spelling_and_start(
    start: list[str], before: list[str], spelling: str, after: list[str], path: str
) -> None:
    option = [word.format(path) for word in spelling.split(" ")]
    command = [*start, *before, *option, *after, *SCRIPT]
    assert hostfile_asked_for(command, launcher_words(["localhost"])) == path
    assert hostfile_asked_for([*start, *before, *after, *SCRIPT], launcher_words(["localhost"])) is None


class FakeProcess:
    """Stands for a process of psutil."""

    def __init__(self, words: list[str], above: list[FakeProcess], folder: Path) -> None:
        self.words = words
        self.above = above
        self.folder = folder

    def cmdline(self) -> list[str]:
        return self.words

    def cwd(self) -> str:
        return str(self.folder)

    def parent(self) -> FakeProcess | None:
        return self.above[0] if self.above else None

    def parents(self) -> list[FakeProcess]:
        return self.above


def start_below(monkeypatch: pytest.MonkeyPatch, folder: Path, *commands: list[str]) -> None:
    """Make this process a descendant of ``commands``, the parent first."""
    above: list[FakeProcess] = []
    for words in reversed(commands):
        above = [FakeProcess(words, above, folder), *above]
    monkeypatch.setattr(psutil, "Process", lambda: FakeProcess([], above, folder))


def test_a_missing_hostfile_is_refused_where_deepspeed_runs_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [*STARTS[0], "--hostf", "hosts", *SCRIPT]
    shell = ["sh", "-c", "wrapper"]
    start_below(monkeypatch, tmp_path, shell, launcher_words(["localhost"]), command, shell)
    with pytest.raises(UserError, match="--hostfile hosts, which is not a file"):
        check_hostfile()
    # Relative to the command's folder, which is not this process's.
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    check_hostfile()
    # It was read, and is gone since.
    (tmp_path / "hosts").unlink()
    start_below(monkeypatch, tmp_path, launcher_words(["node0", "node1"]), command)
    check_hostfile()


@pytest.mark.parametrize(
    "commands",
    [
        [["ansible", "--hostfile", "/no/such/file"]],
        [launcher_words(["localhost"]), [*STARTS[0], *SCRIPT], ["sudo", "-H", *STARTS[0], *SCRIPT]],
        [launcher_words(["localhost"])],
        [["python3", "-m", "deepspeed.launcher.launch", "--world_info=?", *SCRIPT], [*STARTS[0], "-Hx", *SCRIPT]],
    ],
    ids=["another program", "sudo", "the command has ended", "no machines"],
)
def test_other_command_lines_pass(commands: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start_below(monkeypatch, tmp_path, *commands)
    check_hostfile()


def test_a_process_without_a_launcher_passes() -> None:
    check_hostfile()


def test_a_parent_that_has_ended_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: Any) -> None:
        raise psutil.NoSuchProcess(os.getpid())

    monkeypatch.setattr(psutil.Process, "parents", gone)
    check_hostfile()
