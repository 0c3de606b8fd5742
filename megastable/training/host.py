"""This machine's processor and memory, as they are shared among the processes of a run."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

import psutil

GIB = 2**30


def cpu_name() -> str:
    """The maker's name and the number of cores that the system counts."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    name = found.group(1).strip() if found else platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores"


def memory_gib_per_process(num_processes: int) -> float:
    """The machine's memory in equal shares."""
    return float(psutil.virtual_memory().total) / num_processes / GIB


def threads_per_process(num_processes: int) -> int:
    """As a launch of so many processes on one machine sets them; see ``engine.process_group``."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    return int(given) if given.isdigit() else max(1, (os.cpu_count() or 1) // num_processes)
