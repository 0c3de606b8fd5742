"""Faults of one rank in its third step, which leave the other ranks waiting."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed

from megastable.engine.training_engine import TrainingEngine

FAULTY_STEP = 3
COLLECTIVES = ("all_reduce", "broadcast", "all_gather_into_tensor", "all_gather_single", "reduce_scatter_single")


class DoneWork:
    """Stands for a collective that was never begun."""

    def wait(self) -> None:
        """Return at once."""


def sleep() -> None:
    """Do something that does not end."""
    time.sleep(1000)


EVENTS: dict[str, Callable[[], None]] = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "asleep": sleep,
}
"""What happens to a rank at the beginning of its step."""
GROUPS: dict[str, Callable[[Any], Any]] = {
    "data": lambda grid: grid.get_data_parallel_group(),
    "tensor": lambda grid: grid.get_slice_parallel_group(),
    "pipeline": lambda grid: grid.get_pipe_parallel_group(),
}
"""The groups whose collectives a rank can leave out."""


def plant(fault: str, rank: int, mark: str) -> None:
    """Let one of ``EVENTS`` happen to a rank in its third step, or let it leave out the collectives of a group there.

    Any other fault leaves out what is sent to another stage. The file ``mark`` is written when it happens.
    """
    if os.environ["RANK"] != str(rank):
        return
    steps = []
    train_batch = TrainingEngine.train_batch

    def with_fault(self: TrainingEngine, *arguments: Any, **options: Any) -> Any:
        steps.append(1)
        if len(steps) == FAULTY_STEP:
            Path(mark).touch()
            if fault in EVENTS:
                EVENTS[fault]()
            elif fault in GROUPS:
                leave_out(COLLECTIVES, GROUPS[fault](self.deepspeed.grid))
            else:
                leave_out(("send",), None)
        return train_batch(self, *arguments, **options)

    TrainingEngine.train_batch = with_fault  # type: ignore[method-assign]


def leave_out(names: tuple[str, ...], group: Any) -> None:
    """Let some of torch's functions do nothing where they are called for ``group``; without one, wherever they are."""

    def faulty(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if group is None or group in (*arguments, *options.values()):
                return DoneWork()
            return original(*arguments, **options)

        return call

    for name in names:
        setattr(torch.distributed, name, faulty(getattr(torch.distributed, name)))
