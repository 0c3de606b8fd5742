"""How many threads a process of a run has: by its CPU mask, and by what the environment says."""

import os
import subprocess
import sys

import pytest

from megastable.core import host
from megastable.core.host import threads_per_process, usable_cpus

TIME_LIMIT_SECONDS = 60
PIN_AND_COUNT = """
import os
from megastable.core.host import threads_per_process, usable_cpus
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
print(usable_cpus(), threads_per_process(1, {}), threads_per_process(2, {}))
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no CPU masks")
def test_a_process_that_is_pinned_to_one_cpu_has_one_thread() -> None:
    finished = subprocess.run(
        [sys.executable, "-c", PIN_AND_COUNT], capture_output=True, text=True, timeout=TIME_LIMIT_SECONDS
    )
    assert finished.stdout.split() == ["1", "1", "1"], finished.stderr


def test_a_system_without_masks_counts_every_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert usable_cpus() == 6
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert usable_cpus() == 1


@pytest.mark.parametrize(("num_processes", "threads"), [(1, 6), (2, 3), (4, 1), (6, 1), (7, 1)])
def test_processes_share_the_processors_and_each_has_at_least_one(
    monkeypatch: pytest.MonkeyPatch, num_processes: int, threads: int
) -> None:
    monkeypatch.setattr(host, "usable_cpus", lambda: 6)
    assert threads_per_process(num_processes, {}) == threads


@pytest.mark.parametrize(("given", "threads"), [("1", 1), ("5", 5), (" 8 ", 8), ("4,2", 4)])
def test_a_number_in_the_environment_decides(given: str, threads: int) -> None:
    assert threads_per_process(3, {"OMP_NUM_THREADS": given}) == threads


@pytest.mark.parametrize("given", ["", "0", "-1", "many", "²"])
def test_what_is_no_number_of_threads_does_not_count(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setattr(host, "usable_cpus", lambda: 6)
    assert threads_per_process(2, {"OMP_NUM_THREADS": given}) == 3
