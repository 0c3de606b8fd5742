"""Copies that drift apart are found and named: replicas, tied weights, whole parameters on tensor ranks, masters."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed

from tests.support.ranks import run_ranks
from tests.support.steps import build_engine, train
from tests.support.tiny_run import tiny_run

COMMON: dict[str, Any] = {"megastable__training__fp16_on_cpu": True, "megastable__pipeline__num_stages": 2}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "bf16, fp32 sums": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 7}},
}


def verdict(engine: Any) -> str:
    """Return what the check says; empty where all is well."""
    return "\n".join(engine.check_consistency()[0])


def flip_lowest_bit(weight: torch.Tensor) -> None:
    """Change a weight as little as it can be changed."""
    bits = weight.detach().view(-1).view(torch.int32 if weight.element_size() == 4 else torch.int16)
    bits[len(bits) // 2] ^= 1


def damaged_replica() -> dict[str, list[str]]:
    """Return the verdicts before and after one bit of a weight changes on rank 3 alone (stage 1, replica 1)."""
    results = {}
    for name, changes in PRECISIONS.items():
        plan, engine = build_engine(tiny_run(**COMMON, **changes))
        train(plan, engine, 2)
        before = verdict(engine)
        if torch.distributed.get_rank() == 3:
            parameters = dict(engine.deepspeed.module.named_parameters())
            flip_lowest_bit(parameters["4.feed_forward.input.weight"])
        results[name] = [before, verdict(engine)]
    return results


def test_one_bit_on_one_replica_is_found_and_named() -> None:
    for results in run_ranks(damaged_replica, world_size=4):
        for name, (before, after) in results.items():
            assert before == "", name
            # Of two copies nobody can say which is right; the master says it, of the part that its rank holds.
            both = "rank 2 (stage 1, replica 0, tensor 0), rank 3 (stage 1, replica 1, tensor 0)"
            assert f"replicas of block_2.feed_forward.input.weight differ: {both}" in after, name


def damaged_copies() -> list[str]:
    """Flip one bit of the tied embedding on the last stage, and one of a norm on tensor rank 1."""
    verdicts = []
    for tensor, victim in ((1, "tied_modules.embedding.weight"), (2, "4.attention_norm.weight")):
        tensor_parallel = {"size": tensor}
        plan, engine = build_engine(tiny_run(**COMMON, megastable__tensor_parallel=tensor_parallel))
        train(plan, engine, 1)
        verdicts.append(verdict(engine))
        last = engine.stage == 1 and (tensor == 1 or torch.distributed.get_rank() == 3)
        if last:
            flip_lowest_bit(dict(engine.deepspeed.module.named_parameters())[victim])
        verdicts.append(verdict(engine))
    return verdicts


def test_tied_copies_and_copies_on_tensor_ranks_are_compared() -> None:
    for whole, tied, whole_again, norm in run_ranks(damaged_copies, world_size=4):
        assert (whole, whole_again) == ("", "")
        assert "tied copies of embedding.weight differ" in tied and "replicas of" not in tied
        assert "tensor ranks of block_2.attention_norm.weight differ" in norm


def damaged_master() -> list[str]:
    """Flip one bit of a weight of a single replica, which has no other copy: its master alone can tell."""
    verdicts = []
    for changes in PRECISIONS.values():
        plan, engine = build_engine(tiny_run(**COMMON, **changes))
        train(plan, engine, 1)
        if torch.distributed.get_rank() == 1:
            flip_lowest_bit(dict(engine.deepspeed.module.named_parameters())["4.attention.output.weight"])
        verdicts.append(verdict(engine))
    return verdicts


def test_a_weight_that_is_not_its_master_rounded_is_named() -> None:
    for verdicts in run_ranks(damaged_master, world_size=2):
        for text in verdicts:
            assert (
                "block_2.attention.output.weight on rank 1 (stage 1, replica 0, tensor 0) is not its fp32 master"
                in text
            )


def nan_in_master_and_weight() -> str:
    """Let a master be NaN, and the weight follow it, as after an update that has gone bad."""
    _, engine = build_engine(tiny_run(**COMMON))
    engine.model_state.flats()[0]["master"].view(-1)[0] = torch.nan
    engine.model_state.weights_follow_masters()
    return verdict(engine)


def test_a_nan_that_the_weight_has_from_its_master_is_no_difference() -> None:
    assert run_ranks(nan_in_master_and_weight, world_size=2) == ["", ""]
