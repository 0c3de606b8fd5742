"""What cannot be written is kept, in order and within a bound, and never ends a run."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.core.records import Event
from megastable.training.console import PlainLines
from megastable.training.output import LastingFile, LastingWriter
from megastable.training.recorder import Recorder
from megastable.training.run_folder import RunFolder
from megastable.training.run_lock import RunLock
from tests.unit.training.metrics_examples import step_metrics

quick = settings(max_examples=50, deadline=None)  # no deadline: the machine may be busy
FULL = Path("/dev/full")  # every write to it fails as on a full disk
needs_full = pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")


@quick
@given(takes=st.lists(st.none() | st.integers(1, 30), max_size=60), lines=st.lists(st.binary(max_size=12), max_size=20))
def test_lines_arrive_whole_and_in_order_whatever_fails_meanwhile(takes: list[int | None], lines: list[bytes]) -> None:
    """Each entry of ``takes`` is what the target does with one write: take so many bytes, or fail."""
    plan: list[int | None] = list(takes)
    reports: list[str] = []
    lines = [line.replace(b"\n", b"") + b"\n" for line in lines]
    os_write = os.write

    def write(descriptor: int, data: bytes) -> int:
        most = plan.pop(0) if plan else len(data)
        if most is None:
            raise OSError(errno.ENOSPC, "no space left")
        return os_write(descriptor, data[:most])

    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        path = Path(name) / "lines"
        writer = LastingWriter("lines", lambda: os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), reports.append)
        patch.setattr(os, "write", write)
        for line in lines:
            writer.write(line)
        plan.clear()  # the target is sound again
        writer.close()
        assert path.read_bytes() == b"".join(lines)
    assert len(reports) % 2 == 0, "every failure that was reported is followed by the report of its end"


def test_what_is_kept_has_a_bound_and_the_loss_is_reported(tmp_path: Path) -> None:
    reports: list[str] = []
    path = tmp_path / "lines"
    writer = LastingWriter(
        "lines", lambda: os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), reports.append, kept_bytes=30
    )

    def fail(descriptor: int, data: bytes) -> int:
        raise OSError(errno.EIO, "input/output error")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", fail)
        for number in range(10):
            writer.write(b"line %d..\n" % number)  # 10 bytes
    writer.write(b"line A..\n")
    assert path.read_bytes() == b"line 8..\nline 9..\nline A..\n"
    assert reports == [
        "lines cannot be written (input/output error); the run goes on and keeps its lines",
        "lines can be written again, but 8 of its lines are lost",
    ]


class NoWriters:
    """Stands for DeepSpeed's writers, of which one fails."""

    enabled = True

    def write_events(self, event_list: object) -> None:
        """Fail like a service that does not answer."""
        raise ConnectionError("no answer")


@needs_full
def test_a_disk_that_is_full_for_a_while_costs_no_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    paths = RunFolder(tmp_path)
    files = (paths.metrics, paths.events)
    for path in files:
        path.symlink_to(FULL)
    with (
        RunLock.take(paths) as lock,
        Recorder(paths, lock, paths.config.touch, NoWriters(), PlainLines(9, 9)) as recorder,
    ):
        for step in range(1, 10):
            if step == 6:  # somebody makes room
                for path in files:
                    path.unlink()
                    path.touch()
            recorder.record(step_metrics(step=step))
            recorder.record_event(Event(step, step, "skip", "text", {}))
    for path in files:
        assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == list(range(1, 10))
    errors = capfd.readouterr().err.splitlines()
    assert len(errors) == 5, "two files that fail and recover, and a writer: each is reported once"
    assert sum("cannot be written (No space left on device)" in line for line in errors) == 2
    assert sum("can be written again" in line for line in errors) == 2
    assert sum("ConnectionError: no answer" in line for line in errors) == 1


@needs_full
def test_what_waits_for_room_is_written_at_the_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    paths = RunFolder(tmp_path)
    files = (paths.metrics, paths.events)
    for path in files:
        path.symlink_to(FULL)
    with (
        RunLock.take(paths) as lock,
        Recorder(paths, lock, paths.config.touch, NoWriters(), PlainLines(9, 9)) as recorder,
    ):
        recorder.record(step_metrics(step=1))
        recorder.record_event(Event(1, 1, "skip", "text", {}))
        for path in files:
            path.unlink()
    for path in files:
        assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1]
    assert "never written" not in capfd.readouterr().err


@needs_full
def test_what_was_never_written_is_reported_at_the_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "metrics.jsonl"
    path.symlink_to(FULL)
    writer = LastingFile(path)
    for _ in range(3):
        writer.write(b"line\n")
    writer.close()
    assert f"3 lines of {path} were never written" in capfd.readouterr().err


SPEAKING = """
import sys
from megastable.training.output import protect_standard_streams
protect_standard_streams()
from megastable.core.records import Event
from megastable.training.console import make_display
display = make_display(total_steps=9, total_samples=90, consumed_samples=0, interval=1)
for step in range(5):
    display.note("saved in a folder named \\u00fc\\u4e2d \\udcff")
    display.show_event(Event(1, 1, "ramp", "global batch 4 \\u2192 8", {}))
    print("printed by another package", file=sys.stderr)
display.close()
with open(sys.argv[1], "w") as file:
    file.write("went on")
"""


def speak(tmp_path: Path, shell: str, encoding: str = "utf-8") -> tuple[int, str, str]:
    """Run ``SPEAKING`` under a shell's redirections; returns its exit code, its standard error and what it left."""
    script, left = tmp_path / "speak.py", tmp_path / "left"
    script.write_text(SPEAKING)
    finished = subprocess.run(
        ["bash", "-c", shell, "bash", sys.executable, str(script), str(left)],
        env={**os.environ, "PYTHONIOENCODING": encoding, "PYTHONPATH": str(Path(__file__).parents[3])},
        capture_output=True, timeout=60, check=False,
    )  # fmt: skip
    return finished.returncode, finished.stderr.decode(), left.read_text() if left.exists() else ""


@pytest.mark.parametrize(
    ("shell", "encoding", "complaint"),
    [
        ('"$@"', "ascii", ""),
        ('"$@" >&-', "utf-8", ""),
        ('"$@" <&- >&- 2>&-', "utf-8", ""),
        ('set -o pipefail; "$@" | true', "utf-8", "Broken pipe"),
        pytest.param('"$@" > /dev/full', "utf-8", "No space left on device", marks=needs_full),
        pytest.param('"$@" > /dev/full 2>&1', "ascii", "", marks=needs_full),
    ],
    ids=["ascii", "closed", "all closed", "no reader", "full", "both full"],
)
def test_a_standard_output_that_fails_ends_nothing(tmp_path: Path, shell: str, encoding: str, complaint: str) -> None:
    code, errors, left = speak(tmp_path, shell, encoding)
    assert (code, left) == (0, "went on"), errors
    assert "Traceback" not in errors and "Exception ignored" not in errors
    assert errors.count("standard output cannot be written") == (complaint != "")
    assert complaint in errors


def test_a_terminal_that_is_gone_ends_nothing(tmp_path: Path) -> None:
    script, left = tmp_path / "speak.py", tmp_path / "left"
    script.write_text(
        SPEAKING.replace("range(5):", "range(5):\n    time.sleep(0.1)").replace("sys\n", "sys, time\n", 1)
    )
    master, slave = os.openpty()
    process = subprocess.Popen(
        [sys.executable, str(script), str(left)],
        env={**os.environ, "TERM": "xterm", "PYTHONPATH": str(Path(__file__).parents[3])},
        stdin=subprocess.DEVNULL, stdout=slave, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    os.close(slave)
    os.read(master, 100)  # the bar is there
    os.close(master)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, left.read_text()) == (0, "went on"), errors
    assert errors.decode().count("standard output cannot be written") == 1
    assert b"Traceback" not in errors


def test_a_stream_that_somebody_put_in_place_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from megastable.training.output import protect_standard_streams

    own = io.StringIO()
    monkeypatch.setattr(sys, "stdout", own)
    monkeypatch.setattr(sys, "stderr", own)
    protect_standard_streams()
    assert sys.stdout is own and sys.stderr is own
