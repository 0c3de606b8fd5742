"""What goes wrong in silence when tensor ranks are wired wrongly: every gradient, skips, resumes, random streams."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from deepspeed.runtime.pipe import schedule
from torch import nn

from megastable.config import RunConfig
from megastable.engine.instructions import accumulated_gradient
from megastable.engine.tensor_group import whole_parameters
from megastable.engine.training_engine import TrainingEngine
from megastable.model.pieces import cut, parameter_shards
from tests.support.ranks import run_ranks
from tests.support.reference import ReferenceModel, ReferenceStep, train_reference
from tests.support.steps import build_engine, load, save_now, train
from tests.support.tiny_run import tiny_run
from tests.support.tokens import global_batch

LAYOUTS = {
    "pipe 2 x tensor 2": (4, 2, 2, False),
    "pipe 2 x tensor 2, slices": (4, 2, 2, True),
    "data 2 x tensor 2": (4, 1, 2, False),
    "tensor 4, slices": (4, 1, 4, True),
    "all three by 2": (8, 2, 2, False),
    "all three by 2, slices": (8, 2, 2, True),
}
"""Processes, stages, tensor ranks and whether the sequence is split; replicas fill the world."""


def on_each_layout(*in_every_run: str) -> pytest.MarkDecorator:
    """Parametrize a test by ``layout``; layouts that are not in ``in_every_run`` are slow."""
    return pytest.mark.parametrize(
        "layout", [pytest.param(name, marks=() if name in in_every_run else pytest.mark.slow) for name in LAYOUTS]
    )


MODEL: dict[str, Any] = {
    "megastable__model__num_layers": 2,
    "megastable__model__position_embedding": "learned",
    "megastable__model__activation": "swiglu",
    "megastable__model__num_key_value_heads": 2,
    "megastable__batch_rampup": {"final": 4},
}


def run_on(layout: str, **changes: Any) -> RunConfig:
    """Return the tiny run with ``changes`` on a layout."""
    _, num_stages, size, slices = LAYOUTS[layout]
    return tiny_run(
        **changes,
        megastable__pipeline__num_stages=num_stages,
        megastable__tensor_parallel={"size": size, "sequence_parallel": slices},
    )


def on_ranks(function: Callable[..., Any], layout: str, **arguments: Any) -> list[Any]:
    """Call ``function`` on every rank of the layout; return what each one returned."""
    return run_ranks(function, LAYOUTS[layout][0], layout=layout, **arguments)


def named_parameters(engine: TrainingEngine) -> dict[str, nn.Parameter]:
    """Map names in the one-process model to the parameters of this rank."""
    return {name.removeprefix("tied_modules."): p for name, p in engine.deepspeed.module.named_parameters()}


def largest_gradient_error(layout: str) -> float:
    """Measure how far a gradient of this rank, averaged over replicas, is from its part of the one-process one."""
    run = run_on(layout, **MODEL, gradient_clipping=0.0)
    plan, engine = build_engine(run)
    instructions = engine.deepspeed._INSTRUCTION_MAP
    gradients: dict[str, torch.Tensor] = {}

    def keep_then_reduce(pipeline_engine: Any) -> None:
        for name, parameter in named_parameters(engine).items():
            gradient = accumulated_gradient(parameter)
            assert gradient is not None, name
            gradients[name] = gradient.detach().clone()
            torch.distributed.all_reduce(gradients[name], group=engine.deepspeed.grid.get_data_parallel_group())
            gradients[name] /= plan.layout.data_parallel_size
        instructions[schedule.ReduceGrads](pipeline_engine)

    engine.deepspeed._INSTRUCTION_MAP = {**instructions, schedule.ReduceGrads: keep_then_reduce}
    train(plan, engine, 1)

    size, model = run.megastable.model, ReferenceModel(tiny_run(**MODEL))
    ids, labels = global_batch(0, 4, size.seq_length, size.vocab_size)
    logits = model(ids)[..., : size.vocab_size]
    nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert gradients.keys() <= expected.keys() and len(gradients) > 5
    errors = []
    shards = parameter_shards(engine.deepspeed.module)
    for name, parameter in named_parameters(engine).items():
        shard = shards[parameter]
        # The one process pads the vocabulary, too; what pads it is in no whole.
        part = cut(expected[name][: shard.full_shape[0]], shard)
        errors.append(float((gradients[name].view_as(part) - part).norm() / expected[name].norm()))
    return max(errors)


# All of them: which layers and heads a rank holds decides which of its gradients are only parts, and four tensor ranks
# are the only ones that outnumber the key-value heads.
@on_each_layout("pipe 2 x tensor 2", "pipe 2 x tensor 2, slices", "data 2 x tensor 2", "tensor 4, slices")
def test_every_gradient_is_its_part_of_the_one_process_gradient(layout: str) -> None:
    assert max(on_ranks(largest_gradient_error, layout)) < 1e-5


def twenty_steps(layout: str) -> list[list[float]]:
    """Take 20 steps; return their losses and norms."""
    rows = train(*build_engine(run_on(layout, **MODEL)), 20)[1]
    return [[row["loss"] for row in rows], [row["grad_norm"] for row in rows]]


@pytest.fixture(scope="module")
def twenty_plain_steps() -> list[ReferenceStep]:
    """Take the same steps in one process."""
    return train_reference(tiny_run(**MODEL), 20)[0]


@on_each_layout("pipe 2 x tensor 2, slices", "data 2 x tensor 2")
def test_twenty_steps_are_those_of_one_process(layout: str, twenty_plain_steps: list[ReferenceStep]) -> None:
    for losses, norms in on_ranks(twenty_steps, layout):
        assert losses == pytest.approx([step.loss for step in twenty_plain_steps], rel=1e-5)
        assert norms == pytest.approx([step.grad_norm for step in twenty_plain_steps], rel=1e-5)


PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "bf16, fp32 sums": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 7}},
}
ROUGH: dict[str, Any] = {
    "megastable__model__num_layers": 2,
    "megastable__model__dropout": 0.1,
    "megastable__training__fp16_on_cpu": True,
    "megastable__batch_rampup": {"steps": [[0, 4], [8, 8]], "micro_batch_size_steps": [[8, 2]]},
    "megastable__pipeline__activation_checkpointing": True,
}


def one_bad_whole_parameter(layout: str) -> dict[str, Any]:
    """Take 3 steps in every precision, with one inf in the gradient of a norm on the last rank alone at step 1.

    Of what a rank has then, this returns what the others should have as well, and which ranks are its replicas.
    """
    results = {}
    for name, changes in PRECISIONS.items():
        plan, engine = build_engine(run_on(layout, **ROUGH, **changes))
        norm = next(p for n, p in engine.deepspeed.module.named_parameters() if n.endswith("attention_norm.weight"))
        armed = [False]

        def poison(gradient: torch.Tensor, armed: list[bool] = armed) -> torch.Tensor:
            return torch.full_like(gradient, torch.inf) if armed[0] else gradient

        norm.register_hook(poison)

        def arm(state: Any, armed: list[bool] = armed) -> None:
            armed[0] = state.step == 1 and torch.distributed.get_rank() == torch.distributed.get_world_size() - 1

        rows = train(plan, engine, 3, before_step=arm)[1]
        whole = [parameter.detach().flatten() for parameter in whole_parameters(engine.deepspeed.module)]
        together = torch.cat(whole).float()
        copies = [torch.empty_like(together) for _ in range(plan.layout.tensor_parallel_size)]
        torch.distributed.all_gather(copies, together, group=engine.deepspeed.grid.get_slice_parallel_group())
        results[name] = {
            "skipped": [row["skipped"] for row in rows],
            "finite": all(bool(torch.isfinite(p).all()) for p in engine.deepspeed.module.parameters()),
            "copies_equal": all(torch.equal(copy, together) for copy in copies),
            "checksum": float(sum(p.detach().double().sum() for p in engine.deepspeed.module.parameters())),
            "twins": engine.deepspeed.grid.dp_group,
        }
    return results


# Without slices: their sum over tensor ranks would spread the bad value before anybody searches for it.
@on_each_layout("pipe 2 x tensor 2", "data 2 x tensor 2")
def test_one_bad_value_on_one_tensor_rank_skips_the_step_everywhere(layout: str) -> None:
    by_rank = on_ranks(one_bad_whole_parameter, layout)
    for results in by_rank:
        for name, result in results.items():
            assert result["skipped"] == [False, True, False], name
            assert result["finite"], f"{name}: the bad value was applied"
            assert result["copies_equal"], f"{name}: whole parameters drifted apart between tensor ranks"
            sums = {by_rank[rank][name]["checksum"] for rank in result["twins"]}
            assert len(sums) == 1, f"{name}: replicas drifted apart"


SAVE_AT = 3  # after the first step of the larger batches


def continued_and_resumed(layout: str, folder: str) -> dict[str, Any]:
    """Save a run in every precision, with dropout and recomputation; go on, and again from the files in a new engine.

    That a save leaves the run as it is has a test in ``test_resume``; here the run that goes on is the one to be equal
    to.
    """
    results = {}
    keep = ("loss", "grad_norm", "loss_scale", "global_batch_size")
    for name, changes in PRECISIONS.items():
        run = run_on(layout, **ROUGH, **changes)
        plan, engine = build_engine(run)
        state, first = train(plan, engine, SAVE_AT)
        saved = save_now(engine, Path(folder) / name, state)
        continued = train(plan, engine, 2, state)[1]
        plan, engine = build_engine(run)
        torch.manual_seed(99)
        resumed = train(plan, engine, 2, load(engine, saved))[1]
        results[name] = [[[row[key] for key in keep] for row in first + second] for second in (continued, resumed)]
    return results


@on_each_layout("pipe 2 x tensor 2, slices", "data 2 x tensor 2")
def test_a_resume_is_bit_equal(tmp_path: Path, layout: str) -> None:
    for results in on_ranks(continued_and_resumed, layout, folder=str(tmp_path)):
        for name, (continued, resumed) in results.items():
            assert continued == resumed, name
            in_fp32 = [loss for loss, *_ in results["fp32"][0]]
            assert [loss for loss, *_ in continued] == pytest.approx(in_fp32, rel=3e-2), name


def recomputed_and_not() -> dict[str, Any]:
    """Take two steps with dropout: with activations kept and recomputed, without and with slices of the sequence."""
    results: dict[str, Any] = {}
    for layout in ("pipe 2 x tensor 2", "pipe 2 x tensor 2, slices"):
        for recomputed in (False, True):
            changes = {**MODEL, "megastable__model__dropout": 0.2}
            run = run_on(layout, **changes, megastable__pipeline__activation_checkpointing=recomputed)
            rows = train(*build_engine(run), 2)[1]
            results.setdefault(layout, []).append([(row["loss"], row["grad_norm"]) for row in rows])
    return results


def test_recomputation_plays_the_same_masks_back() -> None:
    for layout, (kept, recomputed) in run_ranks(recomputed_and_not, world_size=4)[0].items():
        for (loss, norm), (loss_again, norm_again) in zip(kept, recomputed, strict=True):
            assert (loss_again, norm_again) == (pytest.approx(loss, rel=1e-6), pytest.approx(norm, rel=1e-6)), layout


def data_of_ranks() -> list[int]:
    """Return stage and replica, by which a rank reads its data."""
    _, engine = build_engine(run_on("data 2 x tensor 2"))
    return [engine.stage, engine.replica]


def test_tensor_ranks_read_the_same_data() -> None:
    # Nothing else would notice: different batches on the ranks of one layer train on plausibly.
    assert run_ranks(data_of_ranks, world_size=4) == [[0, 0], [0, 0], [0, 1], [0, 1]]


def masks() -> dict[str, Any]:
    """Tell which elements dropout keeps, where tensor ranks hold the same and where they hold slices."""
    kept = {}
    for slices in (False, True):
        run = tiny_run(
            megastable__model__dropout=0.5,
            megastable__tensor_parallel={"size": 2, "sequence_parallel": slices},
        )
        _, engine = build_engine(run)
        finish = engine.deepspeed.module.forward_funcs[1]
        finish.train()
        kept[str(slices)] = (finish.dropout(torch.ones(2, 8, 32)) > 0).flatten().tolist()
    return kept


def test_ranks_drop_the_same_where_they_hold_the_same_and_otherwise_not() -> None:
    first, second = run_ranks(masks, world_size=2)
    assert first["False"] == second["False"]
    assert first["True"] != second["True"]
