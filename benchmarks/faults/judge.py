"""Judges a run that died and was resumed by the same run that nothing interrupted."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from faults.samples import Samples, samples_of_run

from megastable.checkpoints.folder import kind_of, step_folders
from megastable.checkpoints.verify import verify

TOLERANCE = 1e-5
EXACT = ("consumed_samples", "consumed_tokens", "global_batch_size", "lr", "skipped", "skipped_steps")
CLOSE = ("loss", "grad_norm", "eval_loss")
"""Another layout sums in another order."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Reference:
    """What the uninterrupted run recorded of every step, and the samples of every step."""

    rows: list[Row]
    samples: Samples


@dataclass
class Verdict:
    """What is wrong with a run: a sentence for every fault."""

    lost: list[str] = field(default_factory=list)
    """Steps that are missing, or stand there twice; checkpoints that were published and are gone or unused."""
    wrong: list[str] = field(default_factory=list)
    """Steps with another value or other samples than the reference; damaged checkpoints."""
    largest_difference: float = 0.0
    """Of loss and gradient norm, relative to the reference."""


def read_reference(run_dir: Path, start: Path) -> Reference:
    """Read what the uninterrupted run has recorded."""
    return Reference(read_rows(run_dir), samples_of_run([start]))


def read_rows(run_dir: Path) -> list[Row]:
    """Read the rows of ``metrics.jsonl``; none where the run has not written one."""
    path = run_dir / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def judge(run_dir: Path, starts: list[Path], reference: Reference, verdict: Verdict) -> None:
    """Compare a run that has come to its end with the reference, and look at the checkpoints that it leaves.

    Args:
        starts: where the ranks of each of its starts recorded what they read, in their order.
        verdict: gets what is found.
    """
    rows = read_rows(run_dir)
    steps = [row["step"] for row in rows]
    expected = [row["step"] for row in reference.rows]
    for step in expected:
        if steps.count(step) != 1:
            verdict.lost.append(f"step {step} stands in metrics.jsonl {steps.count(step)} times")
    if steps != sorted(steps) or not set(steps) <= set(expected):
        verdict.lost.append(f"metrics.jsonl has the steps {steps}")
    by_step = {row["step"]: row for row in rows}
    for wanted in reference.rows:
        if wanted["step"] in by_step:
            _compare(wanted, by_step[wanted["step"]], verdict)
    verdict.wrong += _other_samples(starts, reference)
    verdict.wrong += _faults_of_checkpoints(run_dir)


def _compare(wanted: Row, found: Row, verdict: Verdict) -> None:
    """Compare a step, and name all that differs in one sentence."""
    different = [key for key in EXACT if found.get(key) != wanted.get(key)]
    for key in CLOSE:
        if key not in wanted:
            continue
        value = found.get(key)
        difference = math.inf if value is None else abs(value - wanted[key]) / abs(wanted[key])
        verdict.largest_difference = max(verdict.largest_difference, difference)
        if not difference <= TOLERANCE:
            different.append(key)
    if different:
        values = ", ".join(f"{key} is {found.get(key)} and not {wanted.get(key)}" for key in different)
        verdict.wrong.append(f"step {wanted['step']}: {values}")


def _other_samples(starts: list[Path], reference: Reference) -> Iterator[str]:
    try:
        samples = samples_of_run(starts)
    except ValueError as error:
        yield str(error)
        return
    for consumed_samples, wanted in reference.samples.items():
        found = samples.get(consumed_samples)
        if found != wanted:
            yield f"the step after {consumed_samples} samples read {found} and not {wanted}"
    for consumed_samples in samples.keys() - reference.samples.keys():
        yield f"a step began after {consumed_samples} samples, where none begins"


def _faults_of_checkpoints(run_dir: Path) -> Iterator[str]:
    checkpoints = run_dir / "checkpoints"
    folders = step_folders(checkpoints)
    if not folders:
        yield "no checkpoint was left"
    for folder in folders:
        yield from verify(folder)
    for path in checkpoints.iterdir():
        if kind_of(path) != "checkpoint":
            yield f"{path.name} was left"
