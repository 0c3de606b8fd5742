"""What a run will do: its batches, learning rates and operation counts, from the file and the world size."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megastable.config import load_run_file
from megastable.core.batch_rampup import Batch, LinearRamp, RunLength, StepRamp
from megastable.core.errors import UserError
from megastable.core.flops import tflops_per_device
from megastable.core.lr_schedule import LR_SCHEDULES
from megastable.training.run_plan import RunPlan
from tests.support.tiny_run import tiny_run

quick = settings(max_examples=25, deadline=None)  # no deadline: the machine may be busy
RUN_FILES = Path(__file__).parents[3] / "ds_configs"
DECAYING = sorted(LR_SCHEDULES.keys() - {"constant"})


def plan_of(world_size: int = 1, **changes: Any) -> RunPlan:
    """The plan of the tiny run with changes."""
    return RunPlan.of(tiny_run(**changes), world_size)


def learning_rates(plan: RunPlan) -> list[float]:
    """The learning rate of every step of a run without skips, as the loop asks for it."""
    rates, consumed = [], 0
    for _ in range(plan.length.total_steps):
        rates.append(plan.lr_schedule.at(consumed))
        consumed += plan.ramp.at(consumed).global_batch_size
    return rates


# Known failure A1: a ramp must not stretch the schedule


def a1(**changes: Any) -> RunPlan:
    """100 steps, global batch 16, ramp from 8 by 8 over 160 samples, warmup a tenth of the run."""
    ramp = {"start": 8, "increment": 8, "final": 16, "ramp_samples": 160}
    lr_schedule = {"type": "cosine", "warmup": {"fraction": 0.1}, "min_lr": 0.001}
    return plan_of(
        megastable__batch_rampup=ramp,
        **{"megastable__training__total_steps": 100, "megastable__lr_schedule": lr_schedule, **changes},
    )


def test_a1_lengths_come_from_the_samples_really_consumed() -> None:
    assert a1().length == RunLength(total_steps=100, total_samples=1440, last_step_start=1424)


@pytest.mark.parametrize("schedule", DECAYING)
def test_a1_the_peak_is_at_the_warmups_end_and_the_last_step_at_the_minimum(schedule: str) -> None:
    plan = a1(megastable__lr_schedule={"type": schedule, "warmup": {"fraction": 0.1}, "min_lr": 0.001})
    rates = learning_rates(plan)
    # A tenth of 1440 is sample 144, where step 18 begins; a tenth of 1600 would be step 20.
    assert rates.index(max(rates)) == 18
    assert rates[18] == pytest.approx(0.01)
    assert rates[99] == pytest.approx(0.001, abs=1e-12)
    assert min(rates[18:99]) > 0.001


@st.composite
def ramped_runs(draw: st.DrawFn) -> dict[str, Any]:
    """Changes of the tiny run: a ramp of any form, a length in either unit, a warmup in either unit."""
    start, increment, n = draw(st.integers(1, 8)), draw(st.integers(1, 8)), draw(st.integers(1, 6))
    linear = {"start": start, "increment": increment, "final": start + n * increment}
    ramp: dict[str, Any] = draw(
        st.sampled_from(
            [
                {"final": start},
                {**linear, "ramp_samples": draw(st.integers(1, 500))},
                {**linear, "samples_per_increment": draw(st.integers(1, 100))},
                {"steps": [[0, start], [draw(st.integers(1, 300)), start + increment]]},
            ]
        )
    )
    length = draw(st.sampled_from(["total_samples", "total_steps"]))
    warmup = draw(st.sampled_from([0, {"fraction": 0.0}, {"fraction": 0.1}, {"fraction": 0.5}, 5, {"tokens": 160}]))
    return {
        "megastable__batch_rampup": ramp,
        "megastable__training": {length: draw(st.integers(60, 400))},
        "megastable__lr_schedule": {"type": draw(st.sampled_from(DECAYING)), "warmup": warmup, "min_lr": 0.001},
    }


@quick
@given(ramped_runs())
def test_the_last_step_of_any_run_uses_min_lr_and_no_earlier_one_does(changes: dict[str, Any]) -> None:
    plan = plan_of(**changes)
    schedule = plan.lr_schedule
    assume(schedule.warmup_samples < schedule.end_samples)
    rates = learning_rates(plan)
    assert rates[-1] == pytest.approx(0.001, abs=1e-12)
    after_warmup = [rate for step, rate in enumerate(rates) if sample_of_step(plan, step) >= schedule.warmup_samples]
    assert after_warmup == sorted(after_warmup, reverse=True)
    assert all(rate > 0.001 for rate in after_warmup[:-1])


def sample_of_step(plan: RunPlan, step: int) -> int:
    """Samples consumed before ``step``."""
    phase = [phase for phase in plan.phases if phase.first_step <= step][-1]
    return phase.first_sample + (step - phase.first_step) * phase.batch.global_batch_size


@quick
@given(ramped_runs(), st.integers(0, 10**4))
def test_the_ramp_form_does_not_enter_the_schedule(changes: dict[str, Any], samples: int) -> None:
    """Samples are the clock: two runs of equal length and last step have one schedule, whatever their ramps."""
    plan = plan_of(**changes)
    length = plan.length
    flat = {"steps": [[0, 1], [length.last_step_start, length.total_samples - length.last_step_start]]}
    if length.last_step_start == 0:
        flat = {"final": length.total_samples}
    same = {
        **changes,
        "megastable__batch_rampup": flat,
        "megastable__training": {"total_samples": length.total_samples},
    }
    assert plan_of(**same).length.last_step_start == length.last_step_start
    assert plan_of(**same).lr_schedule.at(samples) == plan.lr_schedule.at(samples)


def test_warmup_and_decay_in_every_unit() -> None:
    """The tiny run has 16 tokens a sample; 40 steps of 4 samples are 160."""
    for amounts in [(16, 80), ({"tokens": 256}, {"tokens": 1295}), ({"fraction": 0.1}, {"fraction": 0.5})]:
        schedule = plan_of(
            megastable__batch_rampup={"final": 4},
            megastable__training={"total_steps": 40},
            megastable__lr_schedule={"warmup": amounts[0], "decay": amounts[1], "min_lr": 0.001},
        ).lr_schedule
        assert (schedule.warmup_samples, schedule.end_samples) == (16, 80)
        assert (schedule.max_lr, schedule.min_lr) == (0.01, 0.001)


@pytest.mark.parametrize("name", sorted(LR_SCHEDULES))
def test_every_schedule_can_be_named_in_the_file(name: str) -> None:
    assert type(plan_of(megastable__lr_schedule__type=name).lr_schedule) is LR_SCHEDULES[name]


def test_a_decay_given_in_samples_does_not_depend_on_where_the_run_stops() -> None:
    def rate(total_steps: int) -> float:
        plan = plan_of(
            megastable__batch_rampup={"final": 4},
            megastable__training={"total_steps": total_steps},
            megastable__lr_schedule={"warmup": 8, "decay": 10_000, "min_lr": 0.001},
        )
        return plan.lr_schedule.at(100)

    assert rate(total_steps=50) == rate(total_steps=5000)


# The shipped file of BLOOM-176B


@pytest.fixture(scope="module")
def bloom() -> RunPlan:
    """BLOOM's file on its 12 stages and 8 replicas."""
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
