"""How much a search and a choice of micro-batches compute: work is counted, since seconds depend on the machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.config import ConfigError, load_run_file, run_from_dict
from megastable.config.reading.checking import faults_of_change
from megastable.config.reading.faults import Fault
from megastable.core import pipeline_cost
from megastable.core.errors import UserError
from megastable.core.pipeline_cost import MicroBatchTime, PassSeconds, PipelineCost, StageTime
from megastable.planning.data_sheet_cost import Machine
from megastable.planning.micro_batches import MicroBatchChoice
from megastable.planning.search import MOST_PASSES, search_layouts

RUN_FILES = Path(__file__).parents[3] / "ds_configs"
BLOOM = load_run_file(RUN_FILES / "bloom_176b.json")
A100 = Machine.of("A100")
ROOMY = Machine.of("A100", 312.0, memory_gib=1e6)
"""Devices on which every legal layout fits."""
FINE_RAMP = (
    "megastable.model.num_layers=100",
    "megastable.model.num_attention_heads=96",
    "megastable.model.hidden_size=6144",
    "megastable.batch_rampup.start=384",
    "megastable.batch_rampup.increment=384",
    "megastable.batch_rampup.final=57600",
    "megastable.training.total_samples=100000000",
)


class Played:
    """Counts the pipelines that are played, and their passes."""

    def __init__(self) -> None:
        self.pipelines = 0
        self.passes = 0

    def simulate(self, passes: PassSeconds, num_microbatches: int) -> float:
        """Play, and count."""
        before = simulate.cache_info().misses
        seconds = simulate(passes, num_microbatches)
        if simulate.cache_info().misses > before:
            self.pipelines += 1
            self.passes += 2 * len(passes.forward) * num_microbatches
        return seconds


simulate = pipeline_cost.simulate


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Iterator[Played]:
    simulate.cache_clear()
    counter = Played()
    monkeypatch.setattr(pipeline_cost, "simulate", counter.simulate)
    yield counter


def test_a_search_plays_no_pipeline_twice(played: Played) -> None:
    assert A100 is not None
    found = search_layouts(BLOOM, 384, A100)
    assert sum(candidate.reason is None for candidate in found) == 174
    assert played.pipelines <= 150
    assert played.passes < 2 * MOST_PASSES


def test_a_search_that_would_play_too_much_is_refused_before_it_does(played: Played) -> None:
    assert ROOMY is not None
    run = load_run_file(RUN_FILES / "gpt_1.3b_bf16.json", FINE_RAMP)
    with pytest.raises(UserError, match=r"384 devices fit, .* a larger megastable.batch_rampup.increment"):
        search_layouts(run, 384, ROOMY)
    assert played.passes < 4 * MOST_PASSES


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([1, 2, 4, 12, 70, 71, 72, 128, 129, 10_000]),
    st.sampled_from([1, 2, 3, 4, 7, 16, 112, 1024, 1025]),
    st.booleans(),
)
def test_a_change_has_the_faults_of_the_whole_file(stages: int, tensor: int, sequence_parallel: bool) -> None:
    changed: dict[str, dict[str, Any]] = {
        "pipeline": {"num_stages": stages, "partition": "balanced"},
        "tensor_parallel": {"size": tensor, "sequence_parallel": sequence_parallel},
    }
    raw = json.loads(BLOOM.model_dump_json(by_alias=True, exclude_none=True))
    for section, values in changed.items():
        raw["megastable"][section].update(values)
    assert faults_of_change(BLOOM, changed) == faults_of_file(raw)


def faults_of_file(raw: dict[str, Any]) -> list[Fault]:
    """Return the faults of a whole file."""
    try:
        run_from_dict(raw)
    except ConfigError as error:
        return list(error.faults)
    return []


@pytest.mark.parametrize("num_stages", [60, 64, 128])
def test_a_choice_plays_only_splits_that_may_be_the_fastest(num_stages: int, played: Played) -> None:
    """Measured stages, all a little different, and multiples of 5,040 samples, which have 60 splits and more."""
    stages = tuple(
        StageTime(MicroBatchTime(0.01, 0.1 + stage % 7 / 1000), MicroBatchTime(0.02, 0.2 + stage % 5 / 1000))
        for stage in range(num_stages)
    )
    cost = PipelineCost(stages, MicroBatchTime(0.001, 0.01), fixed_seconds=1.0)
    batches = range(5040, 5040 * 11, 5040)
    choice = MicroBatchChoice(1, cost, needed_bytes=lambda batch: 0.0, usable_bytes=1.0)
    assert choice.micro_batch_size_steps(batches)
    assert played.pipelines <= 15 * len(batches)
