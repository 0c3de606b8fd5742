"""A run folder is written by one run: the second is refused by the first one's name, and a dead one does not block."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.core import process_identity
from megastable.core.errors import RunFolderError
from megastable.core.run_paths import RunPaths
from megastable.training import lock_file, run_lock
from megastable.training.lock_file import Holder
from megastable.training.run_lock import RunLock, Standing

TIME_LIMIT_SECONDS = 60.0
FORK = multiprocessing.get_context("fork")

End = Literal["ends", "is refused", "is killed"]


def holder_in(paths: RunPaths) -> Holder:
    """Read the record of a folder's lock."""
    holder = Holder.read(paths.lock.read_bytes())
    assert holder is not None
    return holder


# Starts at the same instant


def start_a_run(path: str, end: End, pipe: Connection) -> None:
    """Take the lock when told, answer with the refusal, and hold it until told."""
    pipe.recv()
    try:
        lock = RunLock.take(RunPaths(Path(path)))
    except RunFolderError as error:
        pipe.send(str(error))
        os._exit(2)
    pipe.send("")
    pipe.recv()
    if end == "ends":
        lock.begin_writing()
    lock.release()
    os._exit(0)


class Starts:
    """Starts runs in processes of their own, at the same instant."""

    def __init__(self, path: Path, ends: list[End]) -> None:
        self.ends = ends
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        for end in ends:
            own, of_process = FORK.Pipe()
            process = FORK.Process(target=start_a_run, args=(str(path), end, of_process), daemon=True)
            process.start()
            of_process.close()
            self.pipes.append(own)
            self.processes.append(process)
        for pipe in self.pipes:
            pipe.send("start")
        self.refusals = [pipe.recv() if pipe.poll(TIME_LIMIT_SECONDS) else "no answer" for pipe in self.pipes]

    def end(self) -> None:
        """Let the one that holds the lock come to its end."""
        for refusal, end, pipe, process in zip(self.refusals, self.ends, self.pipes, self.processes, strict=True):
            if refusal == "" and end == "is killed":
                os.kill(process.pid, signal.SIGKILL)
            elif refusal == "":
                pipe.send("end")
            process.join(TIME_LIMIT_SECONDS)
            assert process.exitcode is not None
            pipe.close()


ends = st.lists(st.sampled_from(["ends", "is refused", "is killed"]), min_size=2, max_size=5)


@settings(max_examples=12, deadline=None)
@given(rounds=st.lists(ends, min_size=1, max_size=4))
def test_of_starts_at_the_same_instant_one_wins_whatever_the_last_one_left(rounds: list[list[End]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        paths = RunPaths(Path(folder) / "runs" / "run")
        for round_ends in rounds:
            starts = Starts(paths.path, round_ends)
            refusals = [refusal for refusal in starts.refusals if refusal]
            assert len(refusals) == len(round_ends) - 1, starts.refusals
            started = {process.pid for process in starts.processes}
            for refusal in refusals:
                assert f"{paths.path} is in use by another run: process " in refusal
                assert int(refusal.split("process ")[1].split()[0]) in started
            starts.end()
        assert set(os.listdir(folder)) <= {"runs"}
        if paths.path.exists():
            assert os.listdir(paths.path) == ["run.lock"]


# One lock


def test_a_second_run_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = RunPaths(tmp_path / "run")
    monkeypatch.setattr(sys, "argv", ["launch/train.py", "--run-dir", "my run"])
    with RunLock.take(paths):
        holder = holder_in(paths)
        before = paths.lock.stat()
        with pytest.raises(RunFolderError) as caught:
            RunLock.take(paths)
        after = paths.lock.stat()
    named = f"process {os.getpid()} on {os.uname().nodename}, since {holder.since}: launch/train.py --run-dir 'my run'"
    assert f"{paths.path} is in use by another run: {named}\n" in str(caught.value) and caught.value.exit_code == 2
    assert (before.st_ino, before.st_size) == (after.st_ino, after.st_size)
    assert str(caught.value).endswith("In a copy of that run's folder, remove run.lock")


def test_a_run_that_wrote_nothing_leaves_the_folder_as_it_was(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "runs" / "deep" / "run")
    with RunLock.take(paths):
        assert paths.lock.exists()
    assert os.listdir(tmp_path) == []
    with RunLock.take(paths) as lock:
        lock.begin_writing()
    left = paths.lock.read_bytes()
    assert holder_in(paths).ended is not None
    with RunLock.take(paths):
        assert holder_in(paths).ended is None
    assert paths.lock.read_bytes() == left
    with RunLock.take(paths) as lock:
        lock.begin_writing()
        lock.release()  # a second time, at the end of the block, changes nothing
        with RunLock.take(paths) as other:
            lock.release()
            assert other.standing() is Standing.HELD
    assert os.listdir(paths.path) == ["run.lock"]


def test_an_error_gives_the_lock_back(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    with pytest.raises(KeyboardInterrupt), RunLock.take(paths):
        raise KeyboardInterrupt
    with RunLock.take(paths):
        pass


def test_a_folder_that_cannot_be_locked_is_refused(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    paths.lock.mkdir()
    with pytest.raises(RunFolderError, match=r"--run-dir: .* cannot be locked \(Is a directory\)"):
        RunLock.take(paths)


# Another host


@pytest.fixture
def quick_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a lock show life every 10 ms, and be stale after 0.5 s."""
    monkeypatch.setattr(run_lock, "BEAT_SECONDS", 0.01)
    monkeypatch.setattr(lock_file, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(lock_file, "STALE_SECONDS", 0.5)


@pytest.fixture
def of_another_host(tmp_path: Path, quick_clock: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunLock]:
    """Hold the lock of ``tmp_path / "run"`` from another host, which writes there."""
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(process_identity, "_id_space", lambda: "another boot/1")
        lock = RunLock.take(RunPaths(tmp_path / "run"))
    with lock:
        assert lock.begin_writing() is None
        yield lock


def test_a_run_of_another_host_that_lives_is_not_disturbed(of_another_host: RunLock, tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(RunFolderError, match=f"in use by another run: process {os.getpid()} on "):
        RunLock.take(RunPaths(tmp_path / "run"))
    assert time.monotonic() - started < 0.4, "the first sign of life is enough"
    assert of_another_host.standing() is Standing.HELD


def test_a_run_of_another_host_that_shows_no_life_is_succeeded_and_notices(
    of_another_host: RunLock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    paths = RunPaths(tmp_path / "run")
    frozen = monkeypatch.context()
    with frozen as patch:
        patch.setattr(run_lock, "show_life", lambda path, content: None)
        with RunLock.take(paths) as lock:
            assert lock.begin_writing() is None
            waits = capfd.readouterr().err
            assert waits.startswith(f"[megastable] {paths.path} was not left in order by process {os.getpid()} on ")
            # The other one goes on.
            assert of_another_host.standing() is of_another_host.keep() is Standing.TAKEN
            assert f"was taken over by another run, process {os.getpid()} on" in of_another_host.describe_loss()
            assert of_another_host.begin_writing() == of_another_host.describe_loss()
            of_another_host.release()
            assert lock.standing() is Standing.HELD
    # What it finds after the end of the run that took the folder over is not its own either.
    assert of_another_host.keep() is Standing.TAKEN
    assert os.listdir(paths.path) == ["run.lock"]


# What becomes of the lock under a run


def test_a_lock_that_was_removed_is_taken_again_with_its_folder(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "runs" / "run")
    with RunLock.take(paths) as lock:
        lock.begin_writing()
        for remove in (paths.lock.unlink, lambda: shutil.rmtree(tmp_path / "runs")):
            remove()
            assert lock.standing() is Standing.REMOVED
            assert lock.keep() is Standing.REMOVED
            assert lock.keep() is Standing.HELD
        # Another run that is faster has it.
        paths.lock.unlink()
        with RunLock.take(paths) as other:
            assert lock.keep() is Standing.TAKEN
            assert other.keep() is Standing.HELD


def test_a_file_server_that_does_not_answer_is_not_another_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path) -> None:
        raise OSError

    with RunLock.take(RunPaths(tmp_path)) as lock:
        monkeypatch.setattr(run_lock, "look_at", fail)
        assert lock.keep() is Standing.HELD


def test_the_record_is_for_people_to_read(tmp_path: Path) -> None:
    with RunLock.take(RunPaths(tmp_path)) as lock:
        text = lock.path.read_text()
    assert json.loads(text)["process_id"] == os.getpid() and len(text.splitlines()) > 5
