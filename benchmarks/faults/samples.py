"""Which samples each rank really read, written down as it reads them; a rank that dies leaves what it has read."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Samples = dict[int, list[int]]
"""Samples consumed before a step -> the samples of the step, sorted."""


class RecordedSamples:
    """Is a data set that appends a line to a file for every sample that is read of it."""

    def __init__(self, dataset: Any, descriptor: int, prefix: str) -> None:
        self._dataset = dataset
        self._descriptor = descriptor
        self._prefix = prefix

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dataset, name)

    def __getitem__(self, sample: int) -> Any:
        os.write(self._descriptor, f"{self._prefix} {sample}\n".encode())
        return self._dataset[sample]


def record_samples(file: Path) -> None:
    """Let this process append to ``file`` what it reads: samples consumed before the step, replica, sample."""
    from megastable.training import loop

    read = vars(loop)["training_micro_batches"]
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def read_and_record(dataset: Any, order: Any, batch: Any, position: int, replica: int, *rest: Any) -> Iterator[Any]:
        recorded = RecordedSamples(dataset, descriptor, f"{position} {replica}")
        return read(recorded, order, batch, position, replica, *rest)

    vars(loop).update(training_micro_batches=read_and_record)


def begun_steps(folder: Path) -> set[int]:
    """Return the steps that rank 0 of a start has begun, as the samples consumed before each."""
    return {consumed_samples for consumed_samples, _, _ in _rows(folder / "record_0.txt")}


def samples_of_start(folder: Path) -> Samples:
    """Return the samples of all steps that the ranks of one start began.

    Raises:
        ValueError: the ranks that read the same replica's part of a step, such as the first and the last stage's, have
            read different samples.
    """
    of_ranks = [_by_step_and_replica(_rows(path)) for path in sorted(folder.glob("record_*.txt"))]
    longest: dict[tuple[int, int], list[int]] = {}
    for of_rank in of_ranks:
        for key, samples in of_rank.items():
            other = longest.get(key, [])
            # A rank that died, or waits for another, has read the first few.
            common = min(len(samples), len(other))
            if samples[:common] != other[:common]:
                raise ValueError(f"after {key[0]} samples two ranks of replica {key[1]} read {samples} and {other}")
            longest[key] = max(samples, other, key=len)
    steps: Samples = defaultdict(list)
    for (consumed_samples, _), samples in longest.items():
        steps[consumed_samples] += samples
    return {consumed_samples: sorted(samples) for consumed_samples, samples in steps.items()}


def samples_of_run(starts: list[Path]) -> Samples:
    """Return the samples of the steps that count: where starts repeated a step, those of the last of them.

    Raises:
        ValueError: see ``samples_of_start``.
    """
    steps: Samples = {}
    for folder in starts:
        steps |= samples_of_start(folder)
    return steps


def _by_step_and_replica(rows: list[tuple[int, ...]]) -> dict[tuple[int, int], list[int]]:
    samples = defaultdict(list)
    for consumed_samples, replica, sample in rows:
        samples[consumed_samples, replica].append(sample)
    return samples


def _rows(path: Path) -> list[tuple[int, ...]]:
    text = path.read_text(encoding="ascii") if path.exists() else ""
    # A line may just be on its way.
    return [tuple(map(int, line.split())) for line in text[: text.rfind("\n") + 1].splitlines()]
