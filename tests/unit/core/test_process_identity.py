"""A process is told apart from all others, and is said to have ended only where that is certain."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megastable.core import process_identity
from megastable.core.process_identity import ProcessIdentity

needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="this system has no /proc")


def of_child(child: subprocess.Popen[bytes]) -> ProcessIdentity:
    status = process_identity._status_of(child.pid)
    assert status is not None
    return replace(ProcessIdentity.current(), process_id=child.pid, started_ticks=status.started_ticks)


@pytest.fixture
def child() -> subprocess.Popen[bytes]:
    """Start a process that ends when its input is closed."""
    return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)


@needs_proc
def test_a_process_runs_until_it_has_ended(child: subprocess.Popen[bytes]) -> None:
    assert ProcessIdentity.current().is_running()
    identity = of_child(child)
    assert identity.is_running()
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert identity.is_running() is False, "it has ended, though nobody has waited for it yet"
    child.communicate(timeout=60)
    assert identity.is_running() is False


@needs_proc
def test_an_id_that_is_used_again_is_another_process() -> None:
    own = ProcessIdentity.current()
    assert replace(own, started_ticks=own.started_ticks - 1).is_running() is False


@needs_proc
@pytest.mark.parametrize("space", ["", "another boot/4026531836"])
def test_a_process_of_another_machine_cannot_be_seen(space: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = ProcessIdentity.current()
    assert replace(own, process_id=2**22 + 1, id_space=space).is_running() is None
    monkeypatch.setattr(process_identity, "_id_space", lambda: space)
    assert own.is_running() is None


@needs_proc
def test_a_process_that_is_hidden_from_its_user_is_not_said_to_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(process_id: int, number: int) -> None:
        raise PermissionError

    own = ProcessIdentity.current()
    monkeypatch.setattr(os, "kill", refuse)
    assert own.is_running(), "of another user, and visible"
    monkeypatch.setattr(process_identity, "_status_of", lambda process_id: None)
    assert own.is_running() is None


def test_a_system_without_proc_knows_of_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_identity, "_status_of", lambda process_id: None)
    own = ProcessIdentity.current()
    assert own.process_id == os.getpid() and own.id_space == "" and own.is_running() is None
