"""Compiled blocks in the real engine: the steps of a run without, and nothing compiled for ever.

Kernels are compiled for real once; elsewhere the graphs are captured, differentiated and run without a C++ compiler, in
a fraction of the time.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import run_ranks
from tests.support.tiny_run import tiny_run

NUM_STEPS = 5
MANY_SIZES = 3
SMALL: dict[str, Any] = {
    "megastable__model__num_layers": 2,
    "megastable__batch_rampup": {"steps": [[0, 4], [8, 8]], "micro_batch_size_steps": [[8, 2]]},
}
RUNS: dict[str, dict[str, Any]] = {
    "real kernels": {"megastable__batch_rampup": {"final": 4}},
    "two stages": {"megastable__pipeline": {"num_stages": 2}},
    "two replicas, whole blocks again": {"megastable__pipeline": {"activation_checkpointing": True}},
    "two stages, bf16, halves again": {
        "bf16": {"enabled": True},
        "megastable__pipeline": {"num_stages": 2, "activation_checkpointing": ["attention", "feed_forward"]},
    },
}


def steps_of(name: str, compiled: bool) -> list[tuple[float, float]]:
    """Return loss and norm of every step; one of each micro-batch size is watched, and another one follows it."""
    from tests.support.steps import build_engine, train

    run = tiny_run(**{**SMALL, **RUNS[name]}, megastable__model__compile=compiled)
    plan, engine = build_engine(run)
    rows = train(plan, engine, NUM_STEPS, watch=lambda state: state.step in (1, 3))[1]
    assert [row["watched"] is not None for row in rows] == [False, True, False, True, False]
    assert all(row["watched"]["layers"]["block_0"]["max_attention_logit"] for row in rows if row["watched"])
    return [(row["loss"], row["grad_norm"]) for row in rows]


def graphs_and_steps(backend: str, names: list[str]) -> dict[str, Any]:
    """Return, for every run, the number of graphs that were compiled, and the rows without and with compilation."""
    import torch._dynamo
    import torch._inductor.config

    from megastable.engine import pipeline_module

    pipeline_module.BACKEND = backend
    results = {}
    with tempfile.TemporaryDirectory() as cache, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", cache)
        # Torch would compile a program for each set of vector instructions, to see whether it runs: five seconds.
        patch.setattr(torch._inductor.config.cpp, "vec_isa_ok", True)
        for name in names:
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            rows = [steps_of(name, compiled) for compiled in (False, True)]
            results[name] = [torch._dynamo.utils.counters["stats"]["unique_graphs"], *rows]
    return results


def assert_equal_steps(results: dict[str, Any]) -> None:
    """Assert that compilation changes no step, and that every micro-batch size of a run has made one graph."""
    for name, (graphs, plain, compiled) in results.items():
        assert graphs == (1 if name == "real kernels" else 2), name
        for step, (row, expected) in enumerate(zip(compiled, plain, strict=True)):
            assert row == pytest.approx(expected, rel=2e-2 if "bf16" in name else 1e-5), (name, step)


def test_steps_are_equal_and_each_micro_batch_size_is_compiled_once() -> None:
    for results in run_ranks(graphs_and_steps, world_size=2, backend="aot_eager", names=list(RUNS)[1:]):
        assert_equal_steps(results)


def losses_across_checkpoints(folder: str) -> dict[str, list[float]]:
    """Take two steps, save, and take two more in a new engine, by whether the first and the second are compiled."""
    from megastable.engine import pipeline_module
    from tests.support.steps import build_engine, load, save_now, train

    pipeline_module.BACKEND = "aot_eager"
    results = {}
    for order in ((False, False), (False, True), (True, False)):
        runs = [tiny_run(megastable__model__num_layers=2, megastable__model__compile=compiled) for compiled in order]
        plan, engine = build_engine(runs[0])
        state, first = train(plan, engine, 2)
        saved = Path(folder) / str(order)
        save_now(engine, saved, state)
        plan, engine = build_engine(runs[1])
        second = train(plan, engine, 2, load(engine, next(saved.glob("step_*"))))[1]
        results[str(order)] = [row["loss"] for row in (*first, *second)]
    return results


def test_a_checkpoint_continues_with_and_without_compilation(tmp_path: Path) -> None:
    plain, *mixed = run_ranks(losses_across_checkpoints, world_size=1, folder=str(tmp_path))[0].values()
    assert all(losses == pytest.approx(plain, rel=1e-5) for losses in mixed)


def graphs_of_many_sizes() -> int:
    """Count the graphs of one block for more micro-batch sizes than torch would keep forms of a function."""
    import torch._dynamo

    from megastable.engine import pipeline_module
    from tests.support.steps import build_engine

    pipeline_module.BACKEND = "eager"
    torch._dynamo.config.recompile_limit = MANY_SIZES - 1  # torch's own is 8; fewer sizes take less time
    _, engine = build_engine(tiny_run(megastable__model__num_layers=1, megastable__model__compile=True))
    torch._dynamo.utils.counters.clear()
    block = engine.deepspeed.module.forward_funcs[2]
    for size in range(1, MANY_SIZES + 1):
        block(torch.zeros(size, 16, 32))
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def test_more_micro_batch_sizes_than_torch_keeps_forms_are_compiled() -> None:
    assert run_ranks(graphs_of_many_sizes, world_size=1) == [MANY_SIZES]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++ on a CPU")
def test_steps_with_real_kernels_are_equal() -> None:
    assert_equal_steps(run_ranks(graphs_and_steps, world_size=1, backend="inductor", names=["real kernels"])[0])
