"""Monitors of the ranks: one that is far slower than its peers for long, and one whose memory grows without end."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterator
from itertools import pairwise

from megastable.core.partition import stage_costs
from megastable.core.records import Event
from megastable.monitors.monitor import Monitor, PlannedRun, Seen

SLOW_LOOKS = 5
"""Looks in a row: on a shared machine a single one says little."""
SLOW_FACTOR = 2.0
GROWN_LOOKS = 8
LEAST_GROWTH = 0.0025
"""From look to look, as a share of what the process holds: a little comes with every few steps, and a lot once."""


class SlowRanks(Monitor):
    """Warns of a rank whose passes take far longer than those of its peers, at look after look.

    Peers are the other ranks of its stage, which do the very same work. Where it has none, they are all other ranks,
    and times count by the operations of their stages. It remembers nothing over a resume: the processes are others.
    """

    def __init__(self, plan: PlannedRun) -> None:
        super().__init__(plan)
        costs = stage_costs(plan.cut.layers, plan.cut.bounds)
        self._stages = [plan.layout.coordinates(rank)[0] for rank in range(plan.layout.world_size)]
        self._costs = [costs[stage] for stage in self._stages]
        self._peers = [self._peers_of(rank) for rank in range(plan.layout.world_size)]
        self._factors: list[deque[float]] = [deque(maxlen=SLOW_LOOKS) for _ in self._stages]
        self._told: set[int] = set()

    def _peers_of(self, rank: int) -> list[int]:
        others = [other for other in range(len(self._stages)) if other != rank]
        return [other for other in others if self._stages[other] == self._stages[rank]] or others

    def observe(self, seen: Seen) -> Iterator[Event]:
        """Yield a warning for a rank that has become too slow."""
        if seen.result.watched is None or len(self._stages) == 1:
            return
        busy = seen.result.watched.rank_busy_seconds
        for rank, factors in enumerate(self._factors):
            if self._costs[rank] == 0:  # a stage without any operations has nothing to be slow at
                continue
            peers = [busy[peer] * self._costs[rank] / max(self._costs[peer], 1) for peer in self._peers[rank]]
            of_peers = statistics.median(peers)
            factors.append(busy[rank] / max(of_peers, 1e-9))
            factor = min(factors)
            if len(factors) < SLOW_LOOKS or factor < SLOW_FACTOR:
                self._told.discard(rank)
            elif rank not in self._told:
                self._told.add(rank)
                text = (
                    f"{self.plan.layout.describe(rank)} took {statistics.median(factors):.1f} times as long for its "
                    f"passes as its peers, and at least {factor:.1f} times at each of the last {SLOW_LOOKS} looks; all "
                    "wait for it: its device is slow or shared"
                )
                yield seen.event("warning", text, rank=rank, factor=statistics.median(factors))


class MemoryGrowth(Monitor):
    """Warns of a process that holds more at every look, for many looks in a row.

    The first look of a process is left out, at which it has not come to its usual size yet. It remembers nothing over a
    resume: the processes are others.
    """

    def __init__(self, plan: PlannedRun) -> None:
        super().__init__(plan)
        self._is_warm = False
        self._held: list[deque[float]] = [deque(maxlen=GROWN_LOOKS) for _ in range(plan.layout.world_size)]
        self._told: set[int] = set()

    def observe(self, seen: Seen) -> Iterator[Event]:
        """Yield a warning for a rank that has grown for too long."""
        watched = seen.result.watched
        if watched is None:
            return
        is_warm = self._is_warm
        self._is_warm = True
        if not is_warm:
            return
        grown = []
        for rank, held in enumerate(self._held):
            held.append(watched.rank_host_memory_gib[rank])
            grows = all(after > (1 + LEAST_GROWTH) * before for before, after in pairwise(held))
            if len(held) < GROWN_LOOKS or not grows:
                self._told.discard(rank)
            elif rank not in self._told:
                self._told.add(rank)
                grown.append(rank)
        if grown:
            first = self._held[grown[0]]
            others = f", and so do {len(grown) - 1:,} others" if len(grown) > 1 else ""
            text = (
                f"{self.plan.layout.describe(grown[0])} holds more memory at every look, {first[-1]:.3f} GiB after "
                f"{first[0]:.3f} GiB {GROWN_LOOKS - 1} looks before{others}: something is kept that should be freed"
            )
            yield seen.event("warning", text, ranks=grown, host_memory_gib=first[-1])
