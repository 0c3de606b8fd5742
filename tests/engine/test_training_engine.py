"""What an engine leaves alone: the terminal, the writers, and memory as steps go by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from deepspeed.runtime.pipe.engine import TRAIN_BATCH_TIMER

from megastable.core.records import TrainingState
from tests.support.output import captured_output
from tests.support.ranks import run_ranks
from tests.support.steps import build_engine, train
from tests.support.tiny_run import tiny_run
from tests.support.tokens import micro_batches


def output_of_an_engine() -> str:
    """Return what building an engine of two stages and two steps write to the terminal of this rank."""
    with captured_output() as texts:
        train(*build_engine(tiny_run(megastable__pipeline__num_stages=2)), 2)
    return texts[0]


def test_an_engine_is_built_and_steps_in_silence() -> None:
    assert run_ranks(output_of_an_engine, world_size=2) == ["", ""]


def after_three_steps(folder: str) -> dict[str, Any]:
    """Train two replicas with a CSV writer for three steps, and evaluate; return what was written, and what is kept."""
    writer = {"enabled": True, "output_path": folder, "job_name": "job"}
    plan, engine = build_engine(tiny_run(csv_monitor=writer))
    state, _ = train(plan, engine, 3)
    batch = plan.ramp.at(TrainingState().consumed_samples)
    size = plan.run.megastable.model
    data = micro_batches(batch, state.consumed_samples, engine.replica, 2, size.seq_length, size.vocab_size)
    engine.evaluate(data, batch.num_microbatches)
    return {
        "writes": engine.writers.enabled,
        "written": [path.name for path in Path(folder).rglob("*.csv")],
        "records": len(engine.deepspeed.timers(TRAIN_BATCH_TIMER).event_timers),
        "bucket": engine.deepspeed.optimizer.reduce_bucket_size,
        "num_parameters": sum(parameter.numel() for parameter in engine.deepspeed.module.parameters()),
    }


@pytest.fixture(scope="module")
def used(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_ranks(after_three_steps, world_size=2, folder=str(tmp_path_factory.mktemp("csv")))[0]


def test_deepspeed_writes_no_values_of_its_own(used: dict[str, Any]) -> None:
    assert used["writes"]
    assert used["written"] == []


def test_nothing_is_kept_of_past_steps(used: dict[str, Any]) -> None:
    assert used["records"] == 0


def test_the_gradient_bucket_is_no_larger_than_the_model(used: dict[str, Any]) -> None:
    assert 0 < used["bucket"] <= used["num_parameters"]
