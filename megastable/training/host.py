"""Finds out what this machine has: processor and memory, GPUs, text files, and the speed of its CPU.

Planning and preflight touch no hardware; the command line hands them what is found here. Nothing loads torch or numpy
before it is needed, since ``megastable check`` and ``plan`` answer in less time than torch takes to load.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil

from megastable.config import HfSourceConfig, SourceConfig
from megastable.core.errors import UserError
from megastable.planning.calibration import CalibrationFile
from megastable.planning.preflight.review import Gpu, LocalText
from megastable.planning.run_plan import RunPlan

GIB = 2**30
GPU_QUERY = ("nvidia-smi", "--query-gpu=name,compute_cap", "--format=csv,noheader")
TIME_LIMIT_SECONDS = 5


def cpu_name() -> str:
    """Return the maker's name of the processor and the number of cores that the system counts."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:  # another system than Linux
        found = None
    name = found.group(1).strip() if found else platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores"


def memory_gib_per_process(num_processes: int) -> float:
    """Divide the machine's memory into equal shares."""
    return float(psutil.virtual_memory().total) / num_processes / GIB


def threads_per_process(num_processes: int) -> int:
    """Count the threads that a launch of so many processes on one machine gives each; see ``engine.process_group``."""
    given = os.environ.get("OMP_NUM_THREADS", "")  # where it is set, a launch leaves the number of threads to it
    return int(given) if given.isdigit() else max(1, (os.cpu_count() or 1) // num_processes)


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
    """Count the files and bytes of a source of text files; None for other sources, which might need a download."""
    if isinstance(source, HfSourceConfig):
        return None
    from megastable.data.sources import TextFiles, open_source  # loads numpy

    try:
        files = open_source(source)
    except UserError as error:
        return LocalText(0, 0, fault=str(error))
    assert isinstance(files, TextFiles)
    return LocalText(len(files), files.num_bytes())


def probe_this_cpu(plan: RunPlan) -> CalibrationFile:
    """Measure what a step of a planned run costs on this machine, in about ten seconds; loads torch."""
    from megastable.training.cpu_probe import probe

    return probe(plan)
