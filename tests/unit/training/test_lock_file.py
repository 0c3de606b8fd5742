"""A lock of another host: taken over where it shows no life, refused where it does; and its record."""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megastable.training import lock_file
from megastable.training.lock_file import HeldError, Holder, acquire, release, show_life
from tests.unit.training.test_lock_orders import record

# A holder of which nothing but its file can be seen


class Watched:
    """Stands for the clock of a start that watches a lock, and for what happens to the lock meanwhile."""

    def __init__(self, path: Path, happens: dict[int, Callable[[Path], None]]) -> None:
        self.path = path
        self.happens = happens
        self.num_sleeps = 0

    def sleep(self, seconds: float) -> None:
        """Let ``seconds`` pass."""
        self.num_sleeps += 1
        self.happens.get(self.num_sleeps, lambda path: None)(self.path)


def watched(monkeypatch: pytest.MonkeyPatch, path: Path, happens: dict[int, Callable[[Path], None]]) -> Watched:
    """Let what ``happens`` come true at a sleep of that number."""
    clock = Watched(path, happens)
    monkeypatch.setattr(time, "sleep", clock.sleep)
    return clock


ELSEWHERE = record("of another host").to_bytes()
UNSEEN = {"another host's": ELSEWHERE, "empty": b"", "no text": b"\xff\x00", "a list": b"[]", "long": b"x" * 10**6}
NUM_LOOKS = round(lock_file.STALE_SECONDS / lock_file.POLL_SECONDS)


@pytest.mark.parametrize("content", UNSEEN.values(), ids=UNSEEN.keys())
@pytest.mark.parametrize("hours", [-48.0, 0.0, 48.0])
def test_a_lock_that_shows_no_life_is_succeeded_whatever_the_clocks_say(
    tmp_path: Path, content: bytes, hours: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.lock"
    path.write_bytes(content)
    os.utime(path, (time.time() + hours * 3600,) * 2)
    clock = watched(monkeypatch, path, {})
    notes: list[Holder | None] = []
    assert acquire(path, b"own", notes.append) == content[: lock_file.MOST_BYTES]
    assert path.read_bytes() == b"own" and os.listdir(tmp_path) == ["run.lock"]
    assert clock.num_sleeps == NUM_LOOKS and len(notes) == 1


@pytest.mark.parametrize("at", [1, 2, NUM_LOOKS])
def test_a_sign_of_life_refuses_at_once(tmp_path: Path, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.lock"
    path.write_bytes(ELSEWHERE)
    os.utime(path, (0, 0))
    clock = watched(monkeypatch, path, {at: lambda path: show_life(path, ELSEWHERE)})
    with pytest.raises(HeldError) as caught:
        acquire(path, b"own", lambda holder: None)
    assert caught.value.holder == Holder.read(ELSEWHERE) and clock.num_sleeps == at
    assert path.read_bytes() == ELSEWHERE


def test_a_lock_that_is_given_back_meanwhile_is_taken_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.lock"
    path.write_bytes(ELSEWHERE)
    clock = watched(monkeypatch, path, {2: lambda path: release(path, ELSEWHERE, None)})
    assert acquire(path, b"own", lambda holder: None) is None
    assert clock.num_sleeps == 2
    release(path, b"own", ELSEWHERE)
    ended = record("of another host", ended="now").to_bytes()
    clock = watched(monkeypatch, path, {2: lambda path: release(path, ELSEWHERE, ended)})
    assert acquire(path, b"own", lambda holder: None) == ended
    assert clock.num_sleeps == 2


def test_life_is_shown_for_ones_own_record_alone(tmp_path: Path) -> None:
    path = tmp_path / "run.lock"
    path.write_bytes(ELSEWHERE)
    os.utime(path, (0, 0))
    show_life(path, b"own")
    assert path.stat().st_mtime == 0
    show_life(path, ELSEWHERE)
    assert path.stat().st_mtime > 0


def test_a_lock_that_cannot_be_read_is_an_error_and_no_wait(tmp_path: Path) -> None:
    path = tmp_path / "run.lock"
    path.symlink_to(tmp_path / "nothing")
    with pytest.raises(OSError):
        acquire(path, b"own", lambda holder: None)
    path.unlink()
    path.mkdir()
    with pytest.raises(OSError):
        acquire(path, b"own", lambda holder: None)


def test_a_full_disk_leaves_nothing_of_a_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        acquire(tmp_path / "run.lock", b"own", lambda holder: None)
    assert os.listdir(tmp_path) == []


def test_a_record_holds_any_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--run-dir", "r\udcff \x1b[2J\n", "x" * 10**6])
    holder = Holder.current()
    assert Holder.read(holder.to_bytes()) == holder and len(holder.to_bytes()) < lock_file.MOST_BYTES
    assert holder.command.startswith(r"train.py --run-dir 'r\udcff \x1b[2J\n' xxx")
    assert str(holder) == f"process {os.getpid()} on {holder.host}, since {holder.since}: {holder.command}"
    assert holder.is_over() in (False, None)
    assert Holder.current().to_bytes() != holder.to_bytes()


@pytest.mark.parametrize("process_id", [0, -1, 2**31, 1.5, "1", None])
def test_a_record_that_names_no_process_is_none(process_id: object) -> None:
    values = {**record("x").model_dump(), "process_id": process_id}
    assert Holder.read(json.dumps(values).encode()) is None
