"""Compiled blocks in the real engine: the steps of a run without, and nothing compiled for ever.

Kernels are compiled for real once; elsewhere the graphs are captured, differentiated and run without a C++ compiler, in a
fraction of the time.
"""

from __future__ import annotations

import shutil
import tempfile
from typing import Any

import pytest

from tests.support.ranks import run_ranks
from tests.support.tiny_run import tiny_run

NUM_STEPS = 6
SMALL: dict[str, Any] = {
    "megastable__model__num_layers": 2,
    "megastable__batch_rampup": {"steps": [[0, 4], [8, 8]], "micro_batch_size_steps": [[8, 2]]},
}
BF16: dict[str, Any] = {"bf16": {"enabled": True}}
RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "two stages": {"megastable__pipeline": {"num_stages": 2}},
    "whole blocks again": {"megastable__pipeline": {"activation_checkpointing": True}},
    "halves again": {"megastable__pipeline": {"activation_checkpointing": ["attention", "feed_forward"]}},
    "bf16": BF16,
}


def steps_of(name: str, compiled: bool) -> list[tuple[float, float]]:
    """Loss and norm of every step; the fourth is watched, as a second of each micro-batch size."""
    from tests.support.steps import build_engine, train

    run = tiny_run(**SMALL, **RUNS[name], megastable__model__compile=compiled)
    plan, engine = build_engine(run)
    names = [name for name, _ in engine.deepspeed.module.named_parameters()]
    assert not any("_orig_mod" in name for name in names)
    rows = train(plan, engine, NUM_STEPS, watch=lambda state: state.step in (1, 3))[1]
    assert [row["watched"] is not None for row in rows] == [False, True, False, True, False, False]
    assert all(row["watched"]["layers"]["block_0"]["max_attention_logit"] for row in rows if row["watched"])
    return [(row["loss"], row["grad_norm"]) for row in rows]


def graphs_and_steps(backend: str, names: list[str]) -> dict[str, Any]:
    """For every run: the graphs that were compiled, and the rows without and with compilation."""
    import torch._dynamo

    from megastable.engine import compiled_blocks

    compiled_blocks.BACKEND = backend
    results = {}
    with tempfile.TemporaryDirectory() as cache, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", cache)
        for name in names:
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            rows = [steps_of(name, compiled) for compiled in (False, True)]
            results[name] = [torch._dynamo.utils.counters["stats"]["unique_graphs"], *rows]
    return results


def assert_equal_steps(results: dict[str, Any]) -> None:
    """Every micro-batch size of every run has made one graph."""
    for name, (graphs, plain, compiled) in results.items():
        assert graphs == 2, name
        for step, (row, expected) in enumerate(zip(compiled, plain, strict=True)):
            assert row == pytest.approx(expected, rel=2e-2 if name == "bf16" else 1e-5), (name, step)


def test_steps_are_equal_and_each_micro_batch_size_is_compiled_once() -> None:
    for results in run_ranks(graphs_and_steps, world_size=2, backend="aot_eager", names=list(RUNS)):
        assert_equal_steps(results)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++ on a CPU")
def test_steps_with_real_kernels_are_equal() -> None:
    assert_equal_steps(run_ranks(graphs_and_steps, world_size=1, backend="inductor", names=["plain"])[0])
