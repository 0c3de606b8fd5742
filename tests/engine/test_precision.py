"""fp16 and bf16 under the pipeline with ZeRO 1: they follow fp32, skip together, and stay clear of upstream faults."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed

from megastable.engine.training_engine import TrainingEngine
from tests.support.ranks import run_ranks
from tests.support.reference import ReferenceStep, train_reference
from tests.support.steps import build_engine, train
from tests.support.tiny_run import tiny_run

NUM_STEPS = 8
CPU_FP16 = {"megastable__training__fp16_on_cpu": True, "megastable__pipeline__num_stages": 2}
PRECISIONS: dict[str, dict[str, Any]] = {
    "bf16": {"bf16": {"enabled": True}},
    "bf16, fp32 sums": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
    "bf16, fp32 sums at the end of backward": {
        "bf16": {"enabled": True, "immediate_grad_update": False},
        "data_types": {"grad_accum_dtype": "fp32"},
    },
    "fp16 static": {"fp16": {"enabled": True, "loss_scale": 128}},
    "fp16 dynamic": {"fp16": {"enabled": True, "initial_scale_power": 7, "loss_scale_window": 100}},
    # The scale doubles every other step from 2 on: gradients are the same but for a power of two.
    "fp16 growing": {"fp16": {"enabled": True, "initial_scale_power": 1, "loss_scale_window": 2}},
    "fp16, fp32 sums": {
        "fp16": {"enabled": True, "initial_scale_power": 7},
        "data_types": {"grad_accum_dtype": "fp32"},
    },
}


def steps_of_precisions() -> dict[str, Any]:
    """Take the steps of every precision; return their rows, and whether the copies of the tied embedding are equal."""
    results = {}
    for name, changes in PRECISIONS.items():
        plan, engine = build_engine(tiny_run(**CPU_FP16, **changes, gradient_clipping=0.0))
        results[name] = {
            "rows": train(plan, engine, NUM_STEPS)[1],
            "copies_equal": tied_copies_equal(engine),
            "travels_as": str(engine.deepspeed.communication_data_type),
        }
    return results


def tied_copies_equal(engine: TrainingEngine) -> bool:
    """Tell whether all ranks hold the same embedding, to the bit."""
    weight = engine.deepspeed.module.tied_modules["embedding"].weight.detach().clone()
    copies = [torch.empty_like(weight) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(copies, weight)
    return all(torch.equal(weight, copy) for copy in copies)


@pytest.fixture(scope="module")
def precisions() -> dict[str, Any]:
    """Start four processes for the steps of all precisions."""
    return run_ranks(steps_of_precisions, world_size=4)[0]


@pytest.fixture(scope="module")
def expected() -> list[ReferenceStep]:
    """Take the same steps in fp32, in one process."""
    return train_reference(tiny_run(gradient_clipping=0.0), NUM_STEPS)[0]


@pytest.mark.parametrize("name", PRECISIONS)
def test_sixteen_bits_follow_fp32(precisions: dict[str, Any], expected: list[ReferenceStep], name: str) -> None:
    rows = precisions[name]["rows"]
    tolerance = 2e-2 if name.startswith("bf16") else 3e-3
    assert [row["loss"] for row in rows] == pytest.approx([step.loss for step in expected], rel=tolerance)
    assert [row["grad_norm"] for row in rows] == pytest.approx([step.grad_norm for step in expected], rel=3 * tolerance)
    assert not any(row["skipped"] for row in rows)


@pytest.mark.parametrize("name", PRECISIONS)
def test_tied_copies_stay_equal(precisions: dict[str, Any], name: str) -> None:
    assert precisions[name]["copies_equal"]


def test_fp32_sums_travel_in_fp32(precisions: dict[str, Any]) -> None:
    for name, changes in PRECISIONS.items():
        if changes.get("data_types"):
            assert precisions[name]["travels_as"] == "torch.float32", name


def test_a_step_that_grows_the_scale_applies_its_whole_gradient(precisions: dict[str, Any]) -> None:
    growing, static = precisions["fp16 growing"]["rows"], precisions["fp16 static"]["rows"]
    assert growing[-1]["loss_scale"] >= 8 * growing[0]["loss_scale"], "the scale never grew"
    # Half a gradient once would show in Adam's moments at every later step.
    assert [row["loss"] for row in growing] == pytest.approx([row["loss"] for row in static], rel=3e-4)


def overflowing_steps() -> dict[str, Any]:
    """Train in fp16 from a scale that overflows; return the rows, and whether each step changed this rank's weights."""
    run = tiny_run(**CPU_FP16, fp16={"enabled": True, "initial_scale_power": 24, "hysteresis": 1})
    plan, engine = build_engine(run)
    snapshots = []

    def snapshot(_: object) -> None:
        parameters = [parameter.detach().flatten() for parameter in engine.deepspeed.module.parameters()]
        snapshots.append(torch.cat(parameters).clone())

    state, rows = train(plan, engine, 12, before_step=snapshot)
    snapshot(state)
    changed = [not torch.equal(before, after) for before, after in itertools.pairwise(snapshots)]
    return {"rows": rows, "changed": changed, "state": state.to_dict()}


def test_an_overflow_skips_the_step_on_all_ranks() -> None:
    by_rank = run_ranks(overflowing_steps, world_size=4)
    rows = by_rank[0]["rows"]
    skipped = [row["skipped"] for row in rows]
    assert skipped[0] and not skipped[-1], "the test needs skipped steps first and applied ones later"
    for result in by_rank:
        assert [row["skipped"] for row in result["rows"]] == skipped
        # lr is 0 at the first applied step of the warmup: weights may stay equal there, never move on a skip
        assert not any(changed for changed, skip in zip(result["changed"], skipped, strict=True) if skip)
        assert result["changed"][-1]
    num_skipped = skipped.index(False)
    assert {row["lr"] for row in rows[: num_skipped + 1]} == {rows[0]["lr"]}, "a skipped step moved the LR"
    assert rows[num_skipped + 1]["lr"] > rows[0]["lr"]
    assert [row["loss_scale"] for row in rows[: num_skipped + 1]] == [2.0 ** (24 - i) for i in range(num_skipped + 1)]
    assert all(row["grad_norm"] == float("inf") for row in rows[:num_skipped])
    state = by_rank[0]["state"]
    assert state["skipped_steps"] == sum(skipped)
    assert state["consumed_samples"] == sum(row["global_batch_size"] for row in rows)
    assert state["applied_samples"] == sum(row["global_batch_size"] for row in rows if not row["skipped"])


BAD_GRADIENT_PRECISIONS = ("fp32", "bf16", "bf16, fp32 sums", "fp16 dynamic")


def bad_gradient_on_one_rank() -> dict[str, Any]:
    """Put one inf into the gradient of rank 1's first weight at step 2, in every precision."""
    return {name: _bad_gradient_at_step_2({**PRECISIONS, "fp32": {}}[name]) for name in BAD_GRADIENT_PRECISIONS}


def _bad_gradient_at_step_2(changes: dict[str, Any]) -> dict[str, Any]:
    """Take five steps; return which were skipped, and a checksum of this rank's weights before each and at the end."""
    plan, engine = build_engine(tiny_run(**CPU_FP16, **changes))
    victim = next(iter(engine.deepspeed.module.parameters()))
    checksums, armed = [], [False]

    def poison(gradient: torch.Tensor) -> torch.Tensor:
        return torch.full_like(gradient, float("inf")) if armed[0] else gradient

    victim.register_hook(poison)

    def prepare(state: Any) -> None:
        armed[0] = state.step == 2 and torch.distributed.get_rank() == 1
        total = sum(parameter.detach().double().sum() for parameter in engine.deepspeed.module.parameters())
        checksums.append(float(total))

    state, rows = train(plan, engine, 5, before_step=prepare)
    prepare(state)
    return {"skipped": [row["skipped"] for row in rows], "checksums": checksums, "stage": engine.stage}


def test_one_bad_gradient_anywhere_skips_everywhere() -> None:
    by_rank = run_ranks(bad_gradient_on_one_rank, world_size=4)
    for name in BAD_GRADIENT_PRECISIONS:
        results = [result[name] for result in by_rank]
        for result in results:
            assert result["skipped"] == [False, False, True, False, False], name
            assert result["checksums"][2] == result["checksums"][3], f"{name}: weights moved on a skipped step"
            assert result["checksums"][4] != result["checksums"][5], name
            twins = [other for other in results if other["stage"] == result["stage"]]
            assert all(twin["checksums"] == result["checksums"] for twin in twins), f"{name}: replicas drifted apart"
