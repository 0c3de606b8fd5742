"""The forecast of a run: its ramp as training expands it, and nothing that is not known; layouts that are all legal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.config import load_run_file, run_from_dict
from megastable.config.stages import model_parts, model_shape
from megastable.core.devices import Device
from megastable.core.errors import UserError
from megastable.core.layers import num_parameters
from megastable.planning.calibration import CalibrationFile
from megastable.planning.data_sheet_cost import DEFAULT_EFFICIENCY, Machine
from megastable.planning.forecast import Basis, forecast
from megastable.planning.micro_batches import load_plan
from megastable.planning.run_plan import RunPlan
from megastable.planning.search import MICRO_BATCH_SIZES, search_layouts
from tests.support.tiny_run import run_dict
from tests.unit.planning.plan_examples import plan_of, sample_of_step

quick = settings(max_examples=25, deadline=None)
RUN_FILES = Path(__file__).parents[3] / "ds_configs"
SHIPPED = sorted(set(RUN_FILES.glob("*.json")) - {RUN_FILES / "run_file.schema.json"})
A100 = Machine.of("A100")
MINUTE = Machine(Device("slow", dict.fromkeys(("fp32", "bf16", "fp16"), 0.001), memory_gib=1.0), efficiency=1.0)


@pytest.fixture(scope="module")
def bloom() -> dict[str, Any]:
    """Forecast BLOOM on its 384 A100s, as JSON has it."""
    plan = RunPlan.of(load_run_file(RUN_FILES / "bloom_176b.json"), world_size=384)
    return forecast(plan, A100).as_dict()


def test_blooms_golden_ramp(bloom: dict[str, Any]) -> None:
    final = next(entry for entry in bloom["ramp"] if entry["global_batch_size"] == 2048)
    assert final == {
        "first_step": 12_658,
        "first_sample": 9_765_808,
        "global_batch_size": 2048,
        "micro_batch_size": 2,
        "num_microbatches": 128,
    }
    assert bloom["total_tokens"] == bloom["total_samples"] * 2048


def test_bloom_fits_the_80_gb_that_it_was_trained_on(bloom: dict[str, Any]) -> None:
    """Its team reports 60 GB on a GPU, with another trainer."""
    assert bloom["fits"] is True
    assert 30 * 2**30 < bloom["memory"][0]["total"] < 65 * 2**30


@quick
@given(st.sampled_from([1, 2, 4]), st.integers(1, 40), st.sampled_from([1, 2]), st.integers(1, 4))
def test_the_ramp_is_what_training_will_do(world_size: int, total_steps: int, micro: int, start: int) -> None:
    ramp = {"start": 8 * start, "increment": 8, "final": 48, "ramp_samples": 500}
    plan = plan_of(
        world_size,
        megastable__training__total_steps=total_steps,
        train_micro_batch_size_per_gpu=micro,
        megastable__batch_rampup=ramp,
    )
    result = forecast(plan, MINUTE).as_dict()
    assert result["total_steps"] == total_steps == sum(entry["num_steps"] for entry in result["phases"])
    assert len(result["ramp"]) == len(result["phases"])
    for entry, phase in zip(result["ramp"], result["phases"], strict=True):
        assert entry["first_step"] == phase["first_step"]
        assert entry["first_sample"] == sample_of_step(plan, entry["first_step"])
        batch = plan.ramp.at(entry["first_sample"])
        assert (entry["global_batch_size"], entry["micro_batch_size"], entry["num_microbatches"]) == (
            batch.global_batch_size,
            batch.micro_batch_size,
            batch.num_microbatches,
        )
        assert phase["tokens_per_second"] == pytest.approx(batch.global_batch_size * 16 / phase["step_seconds"])
    assert result["seconds_to_train"] == pytest.approx(
        sum(phase["num_steps"] * phase["step_seconds"] for phase in result["phases"])
    )


def test_one_stage_alone_computes_at_its_speed() -> None:
    """No bubble, no links: the hardware TFLOPs are the machine's."""
    result = forecast(plan_of(), MINUTE).as_dict()
    assert all(phase["hardware_tflops_per_device"] == pytest.approx(0.001) for phase in result["phases"])
    assert all(phase["bubble"] == phase["idle_share"] == 0 for phase in result["phases"])


def test_without_a_device_nothing_that_depends_on_one_is_given() -> None:
    result = forecast(plan_of(2, megastable__pipeline__num_stages=2), None).as_dict()
    assert result["seconds_to_train"] is result["fits"] is result["device"] is result["efficiency"] is None
    assert all(phase["step_seconds"] is phase["tflops_per_device"] is None for phase in result["phases"])
    assert all(0 < phase["bubble"] <= phase["idle_share"] < 1 for phase in result["phases"])
    assert "--device" in result["assumptions"][0]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_file_is_forecast_on_its_fewest_devices(path: Path) -> None:
    plan, _ = load_plan(path, None)
    result = forecast(plan, A100).as_dict()
    assert result["seconds_to_train"] > 0
    assert len(result["memory"]) == plan.layout.num_stages
    assert any("45%" in line for line in result["assumptions"])


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_stages_hold_all_blocks_and_the_memory_all_weights(stages: int) -> None:
    plan = plan_of(stages, megastable__pipeline__num_stages=stages, megastable__model__tie_embeddings=False)
    model = plan.run.megastable.model
    held = plan.cut.stages
    assert sum(stage.num_blocks for stage in held) == model.num_layers
    assert (held[0].is_first, held[-1].is_last) == (True, True)
    weights = sum(use["weights"] for use in forecast(plan, None).as_dict()["memory"])
    assert weights == 4 * num_parameters(model_shape(model), model_parts(model))


def test_a_device_is_of_the_table_or_described() -> None:
    assert Machine.of(None) is None
    described = Machine.of("cpu", peak_tflops=0.1, memory_gib=8)
    assert described is not None
    assert (described.on_cpu, described.device.memory_gib) == (True, 8)
    assert described.seconds_per_flop("bf16") == pytest.approx(1 / (0.45 * 0.1e12))
    for half in ({"peak_tflops": 1.0}, {"memory_gib": 1.0}):
        with pytest.raises(UserError, match="must be given"):
            Machine.of("cpu", **half)
    with pytest.raises(UserError, match="--peak-tflops and --memory-gib must be given"):
        Machine.of("cpu")


# What it rests on


def never_measured(plan: RunPlan) -> CalibrationFile:
    """Stand in for a probe where none may run."""
    raise AssertionError("measured")


def basis_of(device: str | None, **options: Any) -> Basis:
    """Find the basis of the tiny run that a command line asks for, on a machine that is not measured."""
    return Basis.of(plan_of(), device, probe=never_measured, **options)


@pytest.mark.parametrize(
    ("device", "options"), [("cpu", {}), (None, {"calibration": Path("sweep.json")})], ids=["probe", "calibration"]
)
def test_an_efficiency_beside_measured_times_is_refused(device: str | None, options: dict[str, Any]) -> None:
    """They have no peak that it could be a share of; refused before anything is measured or read."""
    for efficiency in (0.3, DEFAULT_EFFICIENCY):
        with pytest.raises(UserError, match="--efficiency is a share of a data sheet's peak"):
            basis_of(device, efficiency=efficiency, **options)


@pytest.mark.parametrize("efficiency", [None, 0.3])
@pytest.mark.parametrize(("device", "figures"), [("A100", {}), ("cpu", {"peak_tflops": 0.1, "memory_gib": 8.0})])
def test_an_efficiency_is_of_a_data_sheet(device: str, figures: dict[str, Any], efficiency: float | None) -> None:
    machine = basis_of(device, efficiency=efficiency, **figures).machine
    assert machine is not None
    assert machine.efficiency == (0.45 if efficiency is None else efficiency)


# Search


def test_devices_that_can_be_shared_in_too_many_ways_are_refused_at_once() -> None:
    with pytest.raises(UserError, match=r"720,720 devices can be shared .* in .* ways, and at most 500 are tried"):
        search_layouts(plan_of(1).run, 720_720, MINUTE)


@quick
@given(st.sampled_from([1, 2, 3, 4, 6]), st.sampled_from([24, 48]))
def test_the_search_finds_legal_layouts_and_ranks_them_by_time(devices: int, final: int) -> None:
    """Every feasible candidate is a run file that a launch would take; every other is refused for its reason."""
    ramp = {"start": 8, "increment": 8, "final": final, "ramp_samples": 200}
    plan = plan_of(1, megastable__batch_rampup=ramp)
    found = search_layouts(plan.run, devices, MINUTE)
    feasible = [candidate for candidate in found if candidate.reason is None]
    assert found[: len(feasible)] == feasible
    times = [candidate.seconds_to_train for candidate in feasible]
    assert None not in times
    assert times == sorted(times)  # type: ignore[type-var]
    for candidate in found:
        assert candidate.num_stages * candidate.data_parallel_size * candidate.tensor_parallel_size == devices
        assert (candidate.reason is None) == is_legal(ramp, plan.length.total_samples, candidate, devices)


def is_legal(ramp: dict[str, Any], total_samples: int, candidate: Any, devices: int) -> bool:
    """Tell whether the file that a candidate stands for is accepted; every tiny run fits the memory."""
    raw = run_dict(
        megastable__batch_rampup={**ramp, "start": candidate.ramp_start},
        megastable__pipeline={
            "num_stages": candidate.num_stages,
            "activation_checkpointing": candidate.activation_checkpointing,
        },
        megastable__tensor_parallel={"size": candidate.tensor_parallel_size},
        megastable__training={"total_samples": total_samples},
        train_micro_batch_size_per_gpu=candidate.micro_batch_size,
    )
    try:
        run_from_dict(raw, world_size=devices)
    except UserError:
        return False
    return True


def test_what_the_search_says_of_a_layout_is_what_its_forecast_says() -> None:
    plan = plan_of(4, megastable__pipeline__num_stages=2)
    for candidate in search_layouts(plan.run, 4, MINUTE):
        if (candidate.num_stages, candidate.tensor_parallel_size, candidate.micro_batch_size) != (2, 1, 1):
            continue
        if candidate.activation_checkpointing or candidate.ramp_start != 4:
            continue
        result = forecast(plan, MINUTE)
        assert candidate.seconds_to_train == pytest.approx(result.seconds_to_train)
        assert candidate.memory_gib == pytest.approx(result.memory[result.fullest_stage].total / 2**30)
        return
    raise AssertionError("the file's own layout was not tried")


def test_layouts_that_do_not_fit_are_refused_with_their_need() -> None:
    tight = Machine(Device("tight", dict.fromkeys(("fp32",), 1.0), memory_gib=0.009), efficiency=1.0)
    found = search_layouts(plan_of(2).run, 2, tight)
    reasons = [candidate.reason for candidate in found if candidate.memory_gib is not None and candidate.reason]
    assert reasons
    assert all("GiB" in reason for reason in reasons)
    assert all(
        candidate.memory_gib > 0.009 for candidate in found if candidate.reason in reasons and candidate.memory_gib
    )


def test_a_constant_batch_has_no_start_to_move() -> None:
    plan = plan_of(1, megastable__batch_rampup={"final": 16})
    found = search_layouts(plan.run, 1, MINUTE)
    assert {candidate.ramp_start for candidate in found} == {None}
    assert len(found) == 2 * len(MICRO_BATCH_SIZES)


def test_a_list_of_blocks_for_the_files_stages_does_not_stop_the_search() -> None:
    plan = plan_of(2, megastable__pipeline={"num_stages": 2, "partition": [3, 1]})
    found = search_layouts(plan.run, 4, MINUTE)
    assert {candidate.num_stages for candidate in found if candidate.reason is None} == {1, 2, 4}
