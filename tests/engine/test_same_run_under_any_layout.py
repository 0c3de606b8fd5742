"""Loss and gradient norm are those of one plain process, however the model and the batch are split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

import pytest

from megastable.config import RunConfig
from megastable.config.stages import StageCut
from tests.support.ranks import run_ranks
from tests.support.reference import train_reference
from tests.support.steps import build_engine, train
from tests.support.tiny_run import tiny_run

NUM_STEPS = 7  # batches 4 4 4 8 8 12 12: fewer micro-batches than stages, then more; the last shows the update before
GROUPED_HEADS = "untied learned swiglu rmsnorm, normed queries and keys"
VARIANTS: dict[str, dict[str, Any]] = {
    "tied rotary": {},
    GROUPED_HEADS: {
        "megastable__model__tie_embeddings": False,
        "megastable__model__position_embedding": "learned",
        "megastable__model__activation": "swiglu",
        "megastable__model__norm": "rmsnorm",
        "megastable__model__num_key_value_heads": 2,
        "megastable__model__qk_norm": True,
    },
    "alibi embedding norm, micro-batch size 1 to 2, recomputed": {
        "megastable__model__position_embedding": "alibi",
        "megastable__model__embedding_norm": True,
        "megastable__batch_rampup": {"steps": [[0, 4], [12, 8], [28, 16]], "micro_batch_size_steps": [[8, 2]]},
        "megastable__pipeline__activation_checkpointing": True,
    },
    "GPT-NeoX without biases, halves recomputed, loss in chunks": {
        "megastable__model__rotary_fraction": 0.25,
        "megastable__model__parallel_residual": True,
        "megastable__model__linear_biases": False,
        "megastable__model__activation": "gelu_exact",
        "megastable__pipeline__activation_checkpointing": ["attention", "feed_forward"],
        "megastable__training__loss_chunk_tokens": 8,
    },
    "no clipping, one key-value head, capped logits, z-loss": {
        "gradient_clipping": 0.0,
        "megastable__model__num_key_value_heads": 1,
        "megastable__model__qk_norm": True,
        "megastable__model__attention_logit_cap": 1.0,
        "megastable__model__output_logit_cap": 2.0,
        "megastable__training__z_loss": 0.01,
    },
}
# Only where all processes are stages of one replica: fewer micro-batches than stages, down to a single one.
FEW_MICRO_BATCHES = {"megastable__batch_rampup": {"steps": [[0, 1], [2, 2], [6, 3], [12, 8]]}}


@dataclass(frozen=True)
class Layout:
    """Stages and tensor ranks; replicas fill the world."""

    num_stages: int
    tensor_size: int = 1
    sequence_parallel: bool = False

    def run(self, changes: dict[str, Any]) -> RunConfig:
        """Return the tiny run on this layout."""
        tensor = {"size": self.tensor_size, "sequence_parallel": self.sequence_parallel}
        return tiny_run(**changes, megastable__pipeline__num_stages=self.num_stages, megastable__tensor_parallel=tensor)


TENSOR_4 = Layout(1, 4)
LAYOUTS = {
    2: (Layout(1), Layout(2), Layout(1, 2), Layout(1, 2, True)),
    4: (Layout(2), Layout(4), Layout(2, 2, True)),
}
ONE_REPLICA = {2: (Layout(2), Layout(1, 2, True)), 4: (Layout(4), Layout(2, 2, True))}


def steps_of(changes: dict[str, Any], layouts: list[list[Any]]) -> list[list[dict[str, Any]]]:
    """Return, on every rank, the rows of each layout."""
    return [train(*build_engine(Layout(*layout).run(changes)), NUM_STEPS)[1] for layout in layouts]


def assert_equal_to_one_process(changes: dict[str, Any], world_size: int, layouts: Sequence[Layout]) -> None:
    """Assert that all layouts give the losses and norms of plain torch, the same values on every rank."""
    by_rank = run_ranks(steps_of, world_size, changes=changes, layouts=[list(astuple(layout)) for layout in layouts])
    expected, _ = train_reference(tiny_run(**changes), NUM_STEPS)
    for index, layout in enumerate(layouts):
        rows = by_rank[0][index]
        assert [row["loss"] for row in rows] == pytest.approx([step.loss for step in expected], rel=1e-5), layout
        norms = [row["grad_norm"] for row in rows]
        assert norms == pytest.approx([step.grad_norm for step in expected], rel=1e-5), layout
        for other in by_rank[1:]:
            values = [(row["loss"], row["grad_norm"]) for row in other[index]]
            assert values == [(row["loss"], row["grad_norm"]) for row in rows], f"{layout}: a rank saw another value"


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("world_size", LAYOUTS)
def test_losses_and_norms_equal_one_process(world_size: int, variant: str) -> None:
    assert_equal_to_one_process(VARIANTS[variant], world_size, LAYOUTS[world_size])


# Four tensor ranks show what two do not where they outnumber the key-value heads, and one such variant is enough: what
# the others add are other layers, which the layouts above split as well.
@pytest.mark.parametrize(
    "variant", [pytest.param(name, marks=() if name == GROUPED_HEADS else pytest.mark.slow) for name in VARIANTS]
)
def test_four_tensor_ranks_equal_one_process(variant: str) -> None:
    assert_equal_to_one_process(VARIANTS[variant], 4, [TENSOR_4])


PARTITIONS: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "tied": ({}, [[1, 3], [4, 0], "balanced", "parameters", "type:transformer"]),
    "ends of their own": (
        {"megastable__model__embedding_norm": True, "megastable__model__tie_embeddings": False},
        [[0, 4], [4, 0], "uniform", "type:finish|final"],
    ),
}


def run_cut(changes: dict[str, Any], partition: Any) -> RunConfig:
    """Return the tiny run, cut into two stages by ``partition``."""
    return tiny_run(**changes, megastable__pipeline={"num_stages": 2, "partition": partition})


def steps_of_cuts(changes: dict[str, Any], partitions: list[Any]) -> list[tuple[list[int], list[dict[str, Any]]]]:
    """Return, on every rank, the bounds of each cut into two stages, and its rows."""
    results = []
    for partition in partitions:
        plan, engine = build_engine(run_cut(changes, partition))
        bounds = [int(bound) for bound in engine.deepspeed.module.parts]
        results.append((bounds, train(plan, engine, NUM_STEPS)[1]))
    return results


@pytest.mark.parametrize("variant", PARTITIONS)
def test_losses_do_not_depend_on_where_the_stages_are_cut(variant: str) -> None:
    changes, partitions = PARTITIONS[variant]
    by_rank = run_ranks(steps_of_cuts, 2, changes=changes, partitions=partitions)
    expected, _ = train_reference(tiny_run(**changes), NUM_STEPS)
    for partition, (bounds, rows) in zip(partitions, by_rank[0], strict=True):
        settings = run_cut(changes, partition).megastable
        cut = StageCut.of(settings.model, settings.pipeline, settings.tensor_parallel)
        assert bounds == list(cut.bounds), partition
        assert [row["loss"] for row in rows] == pytest.approx([step.loss for step in expected], rel=1e-5), partition
        norms = [row["grad_norm"] for row in rows]
        assert norms == pytest.approx([step.grad_norm for step in expected], rel=1e-5), partition


@pytest.mark.parametrize("world_size", ONE_REPLICA)
def test_fewer_micro_batches_than_stages(world_size: int) -> None:
    assert_equal_to_one_process(FEW_MICRO_BATCHES, world_size, ONE_REPLICA[world_size])
