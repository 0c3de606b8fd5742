"""Loss and gradient norm are those of one plain process, however the model and the batch are split."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed

from tests.support.ranks import run_ranks
from tests.support.reference import ReferenceStep, train_reference
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
        "megastable__pipeline__activation_checkpointing": True,
    },
    "no clipping": {"gradient_clipping": 0.0},
}
# Only where all processes are stages of one replica: fewer micro-batches than stages, down to a single one.
FEW_MICRO_BATCHES = {
    "few micro-batches": {"megastable__batch_rampup": {"steps": [[0, 1], [2, 2], [6, 3], [12, 8]]}},
}


def cases(world_size: int) -> list[tuple[str, dict[str, Any], int]]:
    """(variant, its changes, stages): every variant on 1 stage, on 2, and on as many as there are processes."""
    every = [(name, changes, stages) for name, changes in VARIANTS.items() for stages in sorted({1, 2, world_size})]
    return every + [(name, changes, world_size) for name, changes in FEW_MICRO_BATCHES.items()]


def steps_of_cases() -> list[list[dict[str, Any]]]:
    """On every rank: the rows of all cases."""
    rows = []
    for _, changes, num_stages in cases(torch.distributed.get_world_size()):
        plan, engine = build_engine(tiny_run(**changes, megastable__pipeline__num_stages=num_stages))
        rows.append(train(plan, engine, NUM_STEPS)[1])
    return rows


@pytest.mark.parametrize("world_size", [2, 4])
def test_losses_and_norms_equal_one_process(world_size: int) -> None:
    by_rank = run_ranks(steps_of_cases, world_size)
    references: dict[str, list[ReferenceStep]] = {}
    for index, (name, changes, num_stages) in enumerate(cases(world_size)):
        if name not in references:
            references[name] = train_reference(tiny_run(**changes), NUM_STEPS)[0]
        case, rows = f"{name}, {num_stages} stages", by_rank[0][index]
        assert [row["loss"] for row in rows] == pytest.approx([step.loss for step in references[name]], rel=1e-5), case
        norms = [row["grad_norm"] for row in rows]
        assert norms == pytest.approx([step.grad_norm for step in references[name]], rel=1e-5), case
        for other in by_rank[1:]:
            values = [(row["loss"], row["grad_norm"]) for row in other[index]]
            assert values == [(row["loss"], row["grad_norm"]) for row in rows], f"{case}: a rank saw another value"
