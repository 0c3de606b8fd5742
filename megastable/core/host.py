"""How many processors this process may use, and its share of them among the processes of a run."""

from __future__ import annotations

import os
from collections.abc import Mapping


def cpu_mask() -> frozenset[int]:
    """Return the processors on which this process may run.

    Schedulers (SLURM, Kubernetes with static CPUs, ``taskset``) give a process a part of the machine by this mask. More
    threads than that take turns on the same cores.
    """
    # The mask is known on Linux only. Elsewhere a process may run on every processor.
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def usable_cpus() -> int:
    """Count the processors on which this process may run."""
    return len(cpu_mask())


def threads_per_process(num_processes: int, environment: Mapping[str, str]) -> int:
    """Return the threads of each of ``num_processes`` processes that may run on the same processors, at least 1.

    Processes of one machine need not be such: SLURM can give every task processors of its own.

    ``OMP_NUM_THREADS`` decides where it holds a positive number; launchers and users set it. Without it the usable
    processors are shared out evenly.
    """
    # OpenMP also takes a list, whose later numbers are for nested regions.
    given = environment.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if given.isdecimal() and int(given) > 0:
        return int(given)
    return max(1, usable_cpus() // num_processes)
