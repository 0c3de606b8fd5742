"""A loss that is not finite while the gradients are skips the update on all ranks, and nothing of the run moves."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed

from megastable.engine.training_engine import TrainingEngine
from tests.support.ranks import run_ranks
from tests.support.steps import build_engine, train
from tests.support.tiny_run import tiny_run

PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "bf16, fp32 sums": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 7, "loss_scale_window": 100}},
}
BAD_STEP = 2


def bad_losses(num_stages: int, tensor_size: int, precisions: list[str]) -> dict[str, Any]:
    """Add inf or NaN to the loss of the last replica in step 2, in every one of the precisions."""
    results = {}
    for name in precisions:
        run = tiny_run(
            megastable__training__fp16_on_cpu=True,
            megastable__pipeline__num_stages=num_stages,
            megastable__tensor_parallel={"size": tensor_size},
            **PRECISIONS[name],
        )
        results[name] = _one_bad_loss(run, float("nan") if name == "fp16" else float("inf"))
    return results


def _one_bad_loss(run: Any, bad: float) -> dict[str, Any]:
    plan, engine = build_engine(run)
    module = engine.deepspeed.module
    last_replica = plan.layout.data_parallel_size - 1
    loss_of, armed, collectives, seen = module.loss_fn, [False], [0], []
    all_reduce = torch.distributed.all_reduce

    def loss_fn(output: Any, targets: Any) -> torch.Tensor:
        loss = loss_of(output, targets)
        return loss + bad if armed[0] else loss  # a constant: the gradient is that of the sound loss

    def counted(*arguments: Any, **keywords: Any) -> Any:
        collectives[0] += 1
        return all_reduce(*arguments, **keywords)

    def prepare(state: Any) -> None:
        armed[0] = state.step == BAD_STEP and engine.replica == last_replica
        seen.append(_fingerprint(engine) | {"collectives": collectives[0]})

    module.loss_fn = loss_fn
    torch.distributed.all_reduce = counted
    try:
        state, rows = train(plan, engine, 5, before_step=prepare)
        prepare(state)
    finally:
        torch.distributed.all_reduce = all_reduce
    return {"rows": rows, "seen": seen, "skipped_steps": state.skipped_steps}


def _fingerprint(engine: TrainingEngine) -> dict[str, Any]:
    """Sum up weights, masters, moments and counts of this rank, by value and to the bit."""
    optimizer = engine.deepspeed.optimizer
    tensors = [parameter.detach() for parameter in engine.deepspeed.module.parameters()]
    for flat, moments in optimizer.optimizer.state.items():
        tensors += [flat.detach(), *(value for value in moments.values() if isinstance(value, torch.Tensor))]
    scaler = getattr(optimizer, "loss_scaler", None)
    counts = {} if scaler is None else {k: v for k, v in vars(scaler).items() if isinstance(v, int | float)}
    return {"state": [float(tensor.double().abs().sum()) for tensor in tensors], "scaler": counts}


@pytest.mark.parametrize(
    ("world_size", "num_stages", "tensor_size", "precisions"), [(4, 2, 1, list(PRECISIONS)), (2, 1, 2, ["fp32"])]
)
def test_a_loss_that_alone_is_not_finite_skips_on_all_ranks(
    world_size: int, num_stages: int, tensor_size: int, precisions: list[str]
) -> None:
    by_rank = run_ranks(bad_losses, world_size, num_stages=num_stages, tensor_size=tensor_size, precisions=precisions)
    for results in by_rank:
        assert list(results) == precisions
        for name, result in results.items():
            rows, seen = result["rows"], result["seen"]
            assert [row["skipped"] for row in rows] == [False, False, True, False, False], name
            assert result["skipped_steps"] == 1
            assert rows[BAD_STEP]["grad_norm"] < 100, f"{name}: the gradients were finite"
            assert not abs(rows[BAD_STEP]["loss"]) < 100, name
            assert all(abs(row["loss"]) < 100 for row in rows if not row["skipped"]), name
            for part in ("state", "scaler"):
                assert seen[BAD_STEP][part] == seen[BAD_STEP + 1][part], f"{name}: {part} moved in a skipped step"
            assert seen[BAD_STEP]["state"] != seen[BAD_STEP - 1]["state"] != seen[BAD_STEP + 2]["state"], name
            used = [after["collectives"] - before["collectives"] for before, after in itertools.pairwise(seen)]
            assert used[BAD_STEP] == used[BAD_STEP - 1], f"{name}: a skipped step needs no further collective"
