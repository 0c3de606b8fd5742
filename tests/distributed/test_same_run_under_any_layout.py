"""Loss and gradient norm are those of one plain process, however the model and the batch are split."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.ranks import run_ranks
from tests.support.reference import train_reference
from tests.support.steps import build_engine, train
from tests.support.tiny_run import tiny_run

NUM_STEPS = 8  # batches 4 4 4 8 8 12 12 12: fewer micro-batches than stages, then more
VARIANTS: dict[str, dict[str, Any]] = {
    "tied rotary": {},
    "untied learned swiglu rmsnorm": {
        "megastable__model__tie_embeddings": False,
        "megastable__model__position_embedding": "learned",
        "megastable__model__activation": "swiglu",
        "megastable__model__norm": "rmsnorm",
        "megastable__model__num_key_value_heads": 2,
    },
    "alibi embedding norm, micro-batch size 1 to 2, recomputed": {
        "megastable__model__position_embedding": "alibi",
        "megastable__model__embedding_norm": True,
        "megastable__batch_rampup": {"steps": [[0, 4], [12, 8], [28, 16]], "micro_batch_size_steps": [[8, 2]]},
        "megastable__pipeline__activation_checkpoint_interval": 1,
    },
    "no clipping": {"gradient_clipping": 0.0},
}


def steps_of_layouts(stage_counts: list[int]) -> dict[str, list[dict[str, Any]]]:
    """On every rank: all variants on all given numbers of stages."""
    results = {}
    for name, changes in VARIANTS.items():
        for num_stages in stage_counts:
            plan, engine = build_engine(tiny_run(**changes, megastable__pipeline__num_stages=num_stages))
            results[f"{name}, {num_stages} stages"] = train(plan, engine, NUM_STEPS)[1]
    return results


@pytest.mark.parametrize(("world_size", "stage_counts"), [(4, [1, 2, 4]), (2, [1, 2])])
def test_losses_and_norms_equal_one_process(world_size: int, stage_counts: list[int]) -> None:
    by_rank = run_ranks(steps_of_layouts, world_size, stage_counts=stage_counts)
    for name, changes in VARIANTS.items():
        expected, _ = train_reference(tiny_run(**changes), NUM_STEPS)
        for num_stages in stage_counts:
            rows = by_rank[0][f"{name}, {num_stages} stages"]
            assert [row["loss"] for row in rows] == pytest.approx([step.loss for step in expected], rel=1e-5)
            assert [row["grad_norm"] for row in rows] == pytest.approx([step.grad_norm for step in expected], rel=1e-5)
            for other in by_rank[1:]:
                values = [(row["loss"], row["grad_norm"]) for row in other[f"{name}, {num_stages} stages"]]
                assert values == [(row["loss"], row["grad_norm"]) for row in rows], "a rank saw another value"
