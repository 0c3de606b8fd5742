"""The GPUs of this machine, asked of the driver's own tool: torch would take seconds to load."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import dataclass

QUERY = ("nvidia-smi", "--query-gpu=name,compute_cap", "--format=csv,noheader")
TIME_LIMIT_SECONDS = 5


@dataclass(frozen=True)
class Gpu:
    """A GPU's name and CUDA compute capability, such as (7, 5)."""

    name: str
    capability: tuple[int, int]


def _ask_driver() -> str:
    answer = subprocess.run(QUERY, capture_output=True, text=True, timeout=TIME_LIMIT_SECONDS, check=True)
    return answer.stdout


def installed_gpus(ask: Callable[[], str] = _ask_driver) -> tuple[Gpu, ...]:
    """One of every kind of GPU here; none where there is no driver or it does not answer."""
    try:
        lines = ask().splitlines()
    except (OSError, subprocess.SubprocessError):
        return ()
    found = dict.fromkeys(gpu for line in lines if (gpu := _read_line(line)) is not None)
    return tuple(found)


def _read_line(line: str) -> Gpu | None:
    name, _, capability = line.rpartition(",")
    major, _, minor = capability.strip().partition(".")
    if not (name and major.isdigit() and minor.isdigit()):
        return None
    return Gpu(name.strip(), (int(major), int(minor)))
