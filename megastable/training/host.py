"""Finds out what this machine has: processor and memory, GPUs, and text files.

Planning and preflight touch no hardware; the command line hands them what is found here. Nothing loads torch or numpy
before it is needed, since ``megastable check`` and ``plan`` answer in less time than torch takes to load.
"""

from __future__ import annotations

import platform
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil

from megastable.config import SourceConfig
from megastable.core.errors import UserError
from megastable.core.host import usable_cpus
from megastable.core.memory import GIB
from megastable.planning.preflight.review import Gpu, LocalText

GPU_QUERY = ("nvidia-smi", "--query-gpu=name,compute_cap", "--format=csv,noheader")
TIME_LIMIT_SECONDS = 5


def cpu_name() -> str:
    """Return the maker's name of the processor and the number of cores that this process may use."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:  # another system than Linux
        found = None
    name = found.group(1).strip() if found else platform.processor() or platform.machine()
    return f"{name}, {usable_cpus()} cores"


def memory_gib_per_process(num_processes: int) -> float:
    """Divide the machine's memory into equal shares."""
    return float(psutil.virtual_memory().total) / num_processes / GIB


def _ask_driver() -> str:
    """Ask the driver's tool for its GPUs: torch would take seconds to load for the same answer."""
    answer = subprocess.run(GPU_QUERY, capture_output=True, text=True, timeout=TIME_LIMIT_SECONDS, check=True)
    return answer.stdout


def installed_gpus(ask: Callable[[], str] = _ask_driver) -> tuple[Gpu, ...]:
    """Return one of every kind of GPU here; none where no driver is installed or it does not answer."""
    try:
        lines = ask().splitlines()
    except (OSError, subprocess.SubprocessError):
        return ()
    # Eight equal GPUs are one thing to review, not eight.
    gpus = [_read_gpu(line) for line in lines]
    return tuple(dict.fromkeys(gpu for gpu in gpus if gpu is not None))


def _read_gpu(line: str) -> Gpu | None:
    """Read ``NVIDIA H200, 9.0``; None for a line of another form, such as an error of the driver's."""
    name, _, capability = line.rpartition(",")
    major, _, minor = capability.strip().partition(".")
    if not (name and major.isdigit() and minor.isdigit()):
        return None
    return Gpu(name.strip(), (int(major), int(minor)))


def look_at_text(source: SourceConfig) -> LocalText | None:
    """Count the documents and bytes of a source; None where that takes a download or reading all of it."""
    from megastable.data.indexed_source import IndexedSource
    from megastable.data.sources import may_download, open_source  # loads numpy

    if may_download(source):
        return None
    try:
        documents = open_source(source)
        num_bytes = documents.num_bytes()
    except UserError as error:
        return LocalText(0, 0, fault=str(error))
    if isinstance(documents, IndexedSource):
        return LocalText(len(documents), 0, num_tokens=documents.num_tokens)
    return None if num_bytes is None else LocalText(len(documents), num_bytes)
