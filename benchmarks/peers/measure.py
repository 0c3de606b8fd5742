"""Steps of all candidates in turns, on the same tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist
from gpt import GlobalBatch, Settings, draw_batch
from trainers import Trainer

WARMUP_ROUNDS = 1  # the first step of each batch size builds schedules and buffers
Rows = list[dict[str, Any]]


def timed_step(trainer: Trainer, batch: GlobalBatch) -> tuple[float, float]:
    """Return the seconds from the first rank's start to the last one's end, and the loss; the same on every rank."""
    dist.barrier()
    started = time.perf_counter()  # one clock for all processes of a machine
    loss = trainer.step(batch)
    own = (started, time.perf_counter(), loss)
    ranks: list[tuple[float, float, float | None]] = [own] * dist.get_world_size()
    dist.all_gather_object(ranks, own)
    known = next(loss for _, _, loss in ranks if loss is not None)
    first_start = min(started for started, _, _ in ranks)
    last_end = max(ended for _, ended, _ in ranks)
    return last_end - first_start, known


def run_rounds(
    trainers: dict[str, Trainer], settings: Settings, batch_sizes: Sequence[int], rounds: int
) -> Iterator[dict[str, Any]]:
    """Yield a row for every batch size of every round. All candidates take every step, in an order that rotates."""
    for turn in range(rounds):
        for size in batch_sizes:
            batch = draw_batch(settings, size, seed=turn * (max(batch_sizes) + 1) + size)
            ready = [name for name, trainer in trainers.items() if not trainer.refusal(batch.num_micro_batches)]
            first = turn % len(ready)
            seconds = {}
            losses = {}
            for name in ready[first:] + ready[:first]:
                seconds[name], losses[name] = timed_step(trainers[name], batch)
            yield {
                "round": turn, "global_batch_size": size, "num_micro_batches": batch.num_micro_batches,
                "seconds": {name: round(seconds[name], 5) for name in ready},
                "losses": {name: losses[name] for name in ready},
            }  # fmt: skip


def measure(
    trainers: dict[str, Trainer],
    settings: Settings,
    batch_sizes: Sequence[int],
    rounds: int,
    deadline: float,
    report: Callable[[dict[str, Any]], None],
) -> Rows:
    """Measure the rows after the warm-up, ended early where rank 0's clock passes ``deadline`` (of time.monotonic)."""
    rows: Rows = []
    for row in run_rounds(trainers, settings, batch_sizes, WARMUP_ROUNDS + rounds):
        report(row)
        if row["round"] >= WARMUP_ROUNDS:
            rows.append(row)
        # Rank 0 decides for all: clocks that disagreed would leave the others waiting in the next step.
        late = [time.monotonic() > deadline]
        dist.broadcast_object_list(late, src=0)
        if late[0]:
            break
    return rows
