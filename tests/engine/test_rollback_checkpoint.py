"""The checkpoint that a rollback takes where no state in memory is good: any that this layout can go on from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megastable.config import RunConfig
from megastable.core.layout import ParallelLayout
from megastable.core.records import TrainingState
from megastable.engine.checkpoint import load_newest
from megastable.planning.run_plan import RunPlan
from megastable.training.saving import why_not_on_this_layout
from tests.support.checkpoints import manifest_of
from tests.support.ranks import run_ranks
from tests.support.steps import build_engine, save_now
from tests.support.tiny_run import tiny_run

BATCHES = [[0, 1], [4, 2], [8, 4]]
"""One sample a step at first, which two replicas cannot share."""


def run_of(**changes: Any) -> RunConfig:
    return tiny_run(megastable__batch_rampup={"steps": BATCHES}, **changes)


def save_two(folder: str) -> None:
    """Save steps 2 and 6 of a run in one process; its batches are of one sample, and then of two."""
    _, engine = build_engine(run_of())
    for step, samples in ((2, 2), (6, 8)):
        save_now(engine, Path(folder), TrainingState(step, samples, samples, 16 * samples))


def gone_back_to(folder: str, before_step: int, num_stages: int) -> tuple[int | None, list[str]]:
    """Go back as the loop does, on another layout, and return the step with what was said."""
    run = run_of(megastable__pipeline__num_stages=num_stages)
    layout = ParallelLayout(num_stages, 2 // num_stages, 1)
    # As a run that was resumed at step 6: only batches from there on have to divide.
    plan = RunPlan.of(run, 2, TrainingState(step=6, consumed_samples=8))
    _, engine = build_engine(tiny_run(megastable__pipeline__num_stages=num_stages))
    said: list[str] = []
    manifest = load_newest(
        Path(folder), before_step, engine.model_state, layout, 1, said.append,
        lambda found: why_not_on_this_layout(plan, found),
    )  # fmt: skip
    return None if manifest is None else manifest.state.step, said


@pytest.mark.parametrize(("num_stages", "reached"), [(2, {7: 6, 6: 2}), (1, {7: 6, 6: None})])
def test_a_checkpoint_of_another_layout_is_taken_or_refused_by_its_batches(
    tmp_path: Path, num_stages: int, reached: dict[int, int | None]
) -> None:
    run_ranks(save_two, world_size=1, folder=str(tmp_path))
    for before_step, expected in reached.items():
        results = run_ranks(
            gone_back_to, world_size=2, folder=str(tmp_path), before_step=before_step, num_stages=num_stages
        )
        assert [step for step, _ in results] == [expected] * 2
        if expected is None:
            assert "earlier batches, which this layout cannot take" in results[0][1][0]


def test_batches_that_came_before_the_start_of_this_process_are_looked_at() -> None:
    run = run_of()
    plan = RunPlan.of(run, 2, TrainingState(step=6, consumed_samples=8))
    fault = why_not_on_this_layout(plan, manifest_of(run, TrainingState(step=2, consumed_samples=2)))
    assert fault is not None and "global batch 1 (from sample 2)" in fault
    assert why_not_on_this_layout(plan, manifest_of(run, TrainingState(step=6, consumed_samples=8))) is None
