"""What a run will do: its batches and operation counts, from the file and the world size."""

from pathlib import Path
from typing import Any

import pytest

from megastable.config import load_run_file
from megastable.core.batch_rampup import Batch, LinearRamp, StepRamp
from megastable.core.errors import UserError
from megastable.core.flops import tflops_per_device
from megastable.planning.run_plan import RunPlan
from tests.support.tiny_run import tiny_run
from tests.unit.planning.plan_examples import plan_of, sample_of_step

RUN_FILES = Path(__file__).parents[3] / "ds_configs"


# The shipped file of BLOOM-176B


@pytest.fixture(scope="module")
def bloom() -> RunPlan:
    """Plan BLOOM's file on its 12 stages and 8 replicas."""
    return RunPlan.of(load_run_file(RUN_FILES / "bloom_176b.json"), world_size=12 * 8 * 4)


def test_blooms_golden_ramp_from_its_file(bloom: RunPlan) -> None:
    assert (bloom.layout.num_stages, bloom.layout.data_parallel_size) == (12, 8)
    final = next(phase for phase in bloom.phases if phase.batch.global_batch_size == 2048)
    assert (final.first_step, final.first_sample) == (12_658, 9_765_808)
    assert sample_of_step(bloom, 12_695) == 9_841_584


def test_blooms_micro_batch_grows_at_784(bloom: RunPlan) -> None:
    batches = [phase.batch for phase in bloom.phases]
    assert batches[0] == Batch(192, 1, 24)
    assert [batch for batch in batches if batch.global_batch_size in (768, 784)] == [
        Batch(768, 1, 96),
        Batch(784, 2, 49),
    ]
    assert batches[-1] == Batch(2048, 2, 128)


def test_blooms_learning_rates(bloom: RunPlan) -> None:
    """Warmup over 183,105 samples to 6e-5, cosine to 6e-6 at sample 200 million, that from there on."""
    schedule = bloom.lr_schedule
    assert schedule.at(183_105) == pytest.approx(6e-5)
    assert schedule.at((183_105 + 200_000_000) // 2) == pytest.approx(3.3e-5, rel=1e-6)
    assert schedule.at(200_000_000) == schedule.at(219_999_999) == pytest.approx(6e-6)


def test_blooms_published_throughput_from_its_file(bloom: RunPlan) -> None:
    assert tflops_per_device(bloom.hardware_flops_per_sample, 2048, 105.22, 384) == pytest.approx(149.0, rel=5e-4)


# The parts


@pytest.mark.parametrize(
    ("ramp", "schedule"),
    [
        ({"final": 8}, StepRamp(((0, 8),))),
        ({"steps": [[0, 4], [10, 8]]}, StepRamp(((0, 4), (10, 8)))),
        ({"start": 4, "increment": 2, "final": 8, "ramp_samples": 50}, LinearRamp(4, 2, 8, 50)),
        ({"start": 4, "increment": 2, "final": 8, "samples_per_increment": 50}, LinearRamp(4, 2, 8, 100)),
    ],
    ids=["constant", "steps", "ramp_samples", "samples_per_increment"],
)
def test_every_form_of_the_ramp(ramp: dict[str, Any], schedule: object) -> None:
    run = tiny_run(megastable__batch_rampup=ramp)
    assert run.megastable.batch_rampup.schedule() == schedule


def test_a_layout_that_does_not_fit_is_refused() -> None:
    with pytest.raises(UserError, match=r"world size 3 .*num_stages \(2\)"):
        plan_of(world_size=3, megastable__pipeline__num_stages=2)
    with pytest.raises(UserError, match=r"brought up 2 process.* asks for 4"):
        plan_of(world_size=2, megastable__training__world_size=4)


def test_a_ramp_that_does_not_fit_the_replicas_is_refused() -> None:
    """Sizes 4, 8 and 12: right on 4 replicas, not on 8."""
    assert plan_of(world_size=4).layout.data_parallel_size == 4
    with pytest.raises(UserError, match=r"global batch 4 [\s\S]*global batch 12 "):
        plan_of(world_size=8)


def test_micro_batch_steps_of_the_file_reach_the_ramp() -> None:
    plan = plan_of(megastable__batch_rampup__micro_batch_size_steps=[[8, 2], [12, 4]])
    assert [phase.batch for phase in plan.phases] == [Batch(4, 1, 4), Batch(8, 2, 4), Batch(12, 4, 3)]


def test_operation_counts_of_the_file_by_hand() -> None:
    """Width 32, 4 blocks, 16 tokens, vocabulary 300 padded to 304."""
    plan = plan_of()
    block = 4 * 2 * 16 * 32 * 32 + 2 * (4 * 2 * 16 * 8 * 16) + 2 * (2 * 16 * 32 * 128)
    head, padded_head = 2 * 16 * 32 * 300, 2 * 16 * 32 * 304
    assert plan.model_flops_per_sample == 3 * (4 * block + head)
    assert plan.hardware_flops_per_sample == 3 * (4 * block + padded_head)


def test_activation_checkpointing_costs_hardware_flops_only() -> None:
    plan, recomputing = plan_of(), plan_of(megastable__pipeline__activation_checkpointing=True)
    assert recomputing.model_flops_per_sample == plan.model_flops_per_sample
    block = 4 * 2 * 16 * 32 * 32 + 2 * (4 * 2 * 16 * 8 * 16) + 2 * (2 * 16 * 32 * 128)
    assert recomputing.hardware_flops_per_sample == plan.hardware_flops_per_sample + 4 * block


@pytest.mark.parametrize("kinds", [["attention"], ["feed_forward"], ["attention", "feed_forward"]])
def test_halves_and_the_head_cost_their_own_hardware_flops(kinds: list[str]) -> None:
    keys: dict[str, Any] = {
        "megastable__pipeline__activation_checkpointing": kinds,
        "megastable__training__loss_chunk_tokens": 8,
    }
    plan, again = plan_of(), plan_of(**keys)
    halves = {
        "attention": 4 * 2 * 16 * 32 * 32 + 2 * (4 * 2 * 16 * 8 * 16),
        "feed_forward": 2 * (2 * 16 * 32 * 128),
    }
    added = 4 * sum(halves[kind] for kind in kinds) + 2 * 16 * 32 * 304
    assert again.hardware_flops_per_sample == plan.hardware_flops_per_sample + added
    assert again.model_flops_per_sample == plan.model_flops_per_sample


def test_swiglu_and_grouped_heads_of_the_file_are_counted() -> None:
    plan = plan_of(
        megastable__model__activation="swiglu",
        megastable__model__ffn_hidden_size=64,
        megastable__model__num_key_value_heads=1,
    )
    queries_and_output, keys_and_values = 2 * (2 * 16 * 32 * 32), 2 * (2 * 16 * 32 * 8)
    block = queries_and_output + keys_and_values + 2 * (4 * 2 * 16 * 8 * 16) + 3 * (2 * 16 * 32 * 64)
    assert plan.model_flops_per_sample == 3 * (4 * block + 2 * 16 * 32 * 300)


@pytest.mark.parametrize(
    "changes",
    [
        {"megastable__model__tie_embeddings": False},
        {"megastable__model__position_embedding": "alibi"},
        {"megastable__model__norm": "rmsnorm"},
        {"megastable__model__attention": "math"},
        {"megastable__pipeline__num_stages": 2, "world_size": 2},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_does_not_change_the_products_does_not_change_the_count(changes: dict[str, Any]) -> None:
    plan, changed = plan_of(), plan_of(**changes)
    assert changed.model_flops_per_sample == plan.model_flops_per_sample
    assert changed.hardware_flops_per_sample == plan.hardware_flops_per_sample
