"""``benchmarks/data.py``: what it measures is what it says."""

from __future__ import annotations

import resource
from pathlib import Path
from types import SimpleNamespace

import data as benchmark
import numpy as np
import pytest

from megastable.core.errors import DamagedDataError
from megastable.data.indexed_format import tokens_path
from megastable.data.indexed_writer import IndexedWriter


def test_each_is_first_in_every_second_round() -> None:
    calls: list[str] = []
    seconds = benchmark.in_turns(
        lambda turn: calls.append(f"ours {turn}"), lambda turn: calls.append(f"theirs {turn}"), 3
    )
    assert calls == ["ours 0", "theirs 0", "theirs 1", "ours 1", "ours 2", "theirs 2"]
    assert [len(each) for each in seconds] == [3, 3]


def test_samples_are_compared_with_their_checksums(tmp_path: Path) -> None:
    writer = IndexedWriter(tmp_path / "pair", 257)
    writer.append(np.ones(64 * benchmark.SEQ_LENGTH, np.int64), np.array([64 * benchmark.SEQ_LENGTH]))
    writer.finish()
    ids = np.memmap(tokens_path(tmp_path / "pair"), "<u2", mode="r+")
    ids[:] = 2
    ids.flush()
    with pytest.raises(DamagedDataError):
        benchmark.samples_per_second(tmp_path / "pair", 257)


def test_memory_has_the_processes_that_encode(monkeypatch: pytest.MonkeyPatch) -> None:
    kib = {resource.RUSAGE_SELF: 3 * 1024, resource.RUSAGE_CHILDREN: 5 * 1024}
    monkeypatch.setattr(resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=kib[who]))
    assert benchmark.memory_with_children_mib(2) == 13
