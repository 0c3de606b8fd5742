"""Faults of processes: one that hangs, one that is slow, one that leaks, and one that is told to end."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING, Any

import torch
from gauntlet.base import FAULT_AT, TOTAL_STEPS, TWO_REPLICAS
from gauntlet.scenario import Scenario
from torch import Tensor

if TYPE_CHECKING:
    from gauntlet.live import Live

HANG_SECONDS = 600.0
HANG_TIMEOUT = 10
SLOWER = 3
PASSES_PER_FORWARD = 3
"""A backward pass takes about as long as two forward passes; all of a rank's slowness is put into the forward one."""
SLOW_FROM = 40
LEAK_FROM = 40
LEAKED_FLOATS = 2**20


def hang(live: Live) -> None:
    """Let rank 1 sleep before a step, as in a file system that does not answer."""
    if live.rank == 1:
        live.before(FAULT_AT, FAULT_AT, lambda: time.sleep(HANG_SECONDS))


def slow_rank(live: Live) -> None:
    """Let every pass of rank 1 take three times as long, from a step on."""
    if live.rank != 1:
        return
    began = [0.0]

    def begin(*_: Any) -> None:
        began[0] = time.perf_counter()

    def lag(*_: Any) -> None:
        if live.lasts(SLOW_FROM, TOTAL_STEPS):
            time.sleep((SLOWER - 1) * PASSES_PER_FORWARD * (time.perf_counter() - began[0]))

    for layer in live.layers:
        layer.register_forward_pre_hook(begin)
        layer.register_forward_hook(lag)


def leak(live: Live) -> None:
    """Let rank 1 keep 4 MiB more after every step, from a step on."""
    kept: list[Tensor] = []
    if live.rank == 1:
        live.after(LEAK_FROM, TOTAL_STEPS, lambda: kept.append(torch.ones(LEAKED_FLOATS)))


SCENARIOS = (
    Scenario(
        "hung_rank", "a rank hangs", FAULT_AT, r"the run hangs", r"stuck: rank 1 ", "by a resume", inject=hang,
        changes={"megastable.training.hang_timeout": HANG_TIMEOUT}, exit_codes=(4,), compares=False,
    ),
    Scenario(
        "slow_rank", "a rank three times slower", SLOW_FROM, r"^warning: .*times as long", r"^warning: rank 1 ",
        "in the run", inject=slow_rank, world_size=4, changes=TWO_REPLICAS, compares=False,
    ),
    Scenario(
        "memory_leak", "a rank that leaks 4 MiB a step", LEAK_FROM, r"^warning: .*memory", r"^warning: rank 1 .*memory",
        "in the run", inject=leak, compares=False,
    ),
    Scenario(
        "sigterm", "SIGTERM to one rank", FAULT_AT, r"^asked_to_stop", r"rank 1 .*got SIGTERM", "by a resume",
        signal=signal.SIGTERM, exit_codes=(75,), compares=False,
    ),
)  # fmt: skip
