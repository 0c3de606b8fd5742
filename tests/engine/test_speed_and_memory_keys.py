"""A loss in chunks and recomputed halves, on the real engine and over tensor ranks: the run stays the same."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.ranks import run_ranks
from tests.support.reference import train_reference
from tests.support.steps import build_engine, train
from tests.support.tiny_run import tiny_run
from tests.support.tokens import micro_batches

NUM_STEPS = 4
ODD: dict[str, Any] = {
    "megastable__model__num_layers": 2,
    "megastable__model__output_logit_cap": 1.0,
    "megastable__training__z_loss": 0.01,
    "megastable__batch_rampup": {"steps": [[0, 4], [8, 8]], "micro_batch_size_steps": [[8, 2]]},
}
UNTIED = {"megastable__model__tie_embeddings": False}
LAYOUTS: dict[str, dict[str, Any]] = {
    "two replicas": {},
    "two stages": {"megastable__pipeline__num_stages": 2},
    "two stages, untied": {"megastable__pipeline__num_stages": 2, **UNTIED},
    "two tensor ranks": {"megastable__tensor_parallel": {"size": 2}},
    "two tensor ranks, untied": {"megastable__tensor_parallel": {"size": 2}, **UNTIED},
    "two tensor ranks, slices": {"megastable__tensor_parallel": {"size": 2, "sequence_parallel": True}},
}


def steps_in_chunks() -> dict[str, Any]:
    """Return the rows of every layout, its loss in chunks of 6 tokens, which divide no slice, and an evaluation."""
    results = {}
    for name, layout in LAYOUTS.items():
        plan, engine = build_engine(tiny_run(**ODD, **layout, megastable__training__loss_chunk_tokens=6))
        state, rows = train(plan, engine, NUM_STEPS)
        batch, size = plan.ramp.at(state.consumed_samples), plan.run.megastable.model
        data = micro_batches(
            batch, 0, engine.replica, plan.layout.data_parallel_size, size.seq_length, size.vocab_size
        )  # fmt: skip
        evaluated = engine.evaluate(data if engine.needs_data else None, batch.num_microbatches)
        rows = [*rows, {"loss": evaluated, "grad_norm": 0.0}]
        results[name] = [(row["loss"], row["grad_norm"]) for row in rows]
    return results


def test_a_loss_in_chunks_trains_like_one_plain_process() -> None:
    by_rank = run_ranks(steps_in_chunks, world_size=2)
    for name, rows in by_rank[0].items():
        expected, _ = train_reference(tiny_run(**ODD, **(UNTIED if "untied" in name else {})), NUM_STEPS)
        assert [loss for loss, _ in rows[:-1]] == pytest.approx([step.loss for step in expected], rel=1e-5), name
        assert [norm for _, norm in rows[:-1]] == pytest.approx([step.grad_norm for step in expected], rel=1e-5), name
    evaluated = [rows[name][-1][0] for rows in by_rank for name in rows if "untied" not in name]
    assert evaluated == pytest.approx([evaluated[0]] * len(evaluated), rel=1e-5)


PRECISIONS: dict[str, dict[str, Any]] = {
    "bf16": {"bf16": {"enabled": True}},
    "bf16, fp32 sums": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
    "bf16, fp32 sums, late": {
        "bf16": {"enabled": True, "immediate_grad_update": False},
        "data_types": {"grad_accum_dtype": "fp32"},
    },
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 7}},
    "fp16, fp32 sums": {
        "fp16": {"enabled": True, "initial_scale_power": 7},
        "data_types": {"grad_accum_dtype": "fp32"},
    },
}


def precisions_whole_and_in_chunks() -> dict[str, Any]:
    """Return, in every precision, losses and norms with all logits at once, and in chunks."""
    results: dict[str, Any] = {}
    for name, keys in PRECISIONS.items():
        for chunk_tokens in (None, 6):
            run = tiny_run(
                **ODD, **UNTIED, **keys,
                megastable__training__loss_chunk_tokens=chunk_tokens, megastable__training__fp16_on_cpu=True,
            )  # fmt: skip
            rows = train(*build_engine(run), NUM_STEPS)[1]
            results.setdefault(name, []).append([(row["loss"], row["grad_norm"]) for row in rows])
    return results


def test_no_precision_loses_a_gradient_of_the_head_in_chunks() -> None:
    for name, (whole, chunks) in run_ranks(precisions_whole_and_in_chunks, world_size=1)[0].items():
        for (loss, norm), (own_loss, own_norm) in zip(whole, chunks, strict=True):
            assert own_loss == pytest.approx(loss, rel=2e-3), name
            assert own_norm == pytest.approx(norm, rel=2e-2), name


KINDS = [False, True, ["attention"], ["feed_forward"], ["attention", "feed_forward"]]


def kinds_with_dropout() -> dict[str, Any]:
    """Return, on tensor ranks without and with slices, losses and norms of every kind of recomputation."""
    results: dict[str, Any] = {}
    for slices in (False, True):
        for kinds in KINDS:
            run = tiny_run(
                megastable__model__num_layers=2, megastable__model__dropout=0.2,
                megastable__tensor_parallel={"size": 2, "sequence_parallel": slices},
                megastable__pipeline__activation_checkpointing=kinds,
            )  # fmt: skip
            rows = train(*build_engine(run), 3)[1]
            results.setdefault(f"slices {slices}", []).append([(row["loss"], row["grad_norm"]) for row in rows])
    return results


def test_every_kind_plays_the_masks_of_tensor_ranks_back() -> None:
    for name, (kept, *others) in run_ranks(kinds_with_dropout, world_size=2)[0].items():
        for kinds, rows in zip(KINDS[1:], others, strict=True):
            assert rows == kept, f"{name}, {kinds}"
