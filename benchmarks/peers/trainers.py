"""The candidates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from gpt import GlobalBatch, Settings
from one_process import OneProcess
from own_engine import Megastable
from report import LIMIT, OWN, STOCK
from stock_deepspeed import StockDeepSpeed
from torch_pipelining import OneForwardOneBackward, ZeroBubbleV


class Trainer(Protocol):
    """One candidate on one rank; all ranks call it together."""

    def refusal(self, num_micro_batches: int) -> str | None:
        """Say why it cannot train on this number of micro-batches; None where it can."""
        ...

    def step(self, batch: GlobalBatch) -> float | None:
        """Take one optimizer step; returns the token mean of the loss, on the rank that has it at least."""
        ...


PEERS: dict[str, Callable[[Settings, list[int]], Trainer]] = {
    OWN: lambda settings, bounds: Megastable(settings),
    STOCK: lambda settings, bounds: StockDeepSpeed(settings, fused=False),
    "DeepSpeed fused": lambda settings, bounds: StockDeepSpeed(settings, fused=True),
    "torch 1F1B": OneForwardOneBackward,
    "torch ZBV": lambda settings, bounds: ZeroBubbleV(settings),
    LIMIT: OneProcess,
}
"""Name -> how it is built from the settings and megastable's own stage bounds."""
