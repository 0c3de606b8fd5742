"""What a look at every layer shows is what one plain process computes, under any layout."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megastable.config import RunConfig
from megastable.model.attention import QueryKeyScale
from megastable.model.layers import gpt_layers
from megastable.model.tensor_parallel import ColumnParallelLinear, OneProcess, RowParallelLinear
from megastable.planning.run_plan import RunPlan
from tests.support.ranks import run_ranks
from tests.support.reference import ReferenceModel, reference_optimizer
from tests.support.steps import build_engine, train
from tests.support.tiny_run import tiny_run
from tests.support.tokens import global_batch

NUM_STEPS, BATCH = 3, 8
VARIANTS: dict[str, dict[str, Any]] = {
    "tied": {"gradient_clipping": 0.1},
    "untied, grouped heads, recomputed": {
        "gradient_clipping": 0.0,
        "megastable__model__tie_embeddings": False,
        "megastable__model__num_key_value_heads": 2,
        "megastable__pipeline__activation_checkpointing": True,
    },
}
LAYOUTS = {  # stages, tensor ranks, slices; four processes
    "2 stages, 2 replicas": (2, 1, False),
    "2 stages, tensor 2, slices": (2, 2, True),
    "tensor 2, 2 replicas": (1, 2, False),
}


def run_of(variant: str, **changes: Any) -> RunConfig:
    """Return the tiny run of a variant, with batches of one size."""
    return tiny_run(**VARIANTS[variant], megastable__batch_rampup={"final": BATCH}, **changes)


def watched(variant: str) -> dict[str, Any]:
    """Watch the last step; return what was seen, by layout."""
    results = {}
    for name, (num_stages, size, slices) in LAYOUTS.items():
        run = run_of(
            variant,
            megastable__pipeline__num_stages=num_stages,
            megastable__tensor_parallel={"size": size, "sequence_parallel": slices},
        )
        rows = train(*build_engine(run), NUM_STEPS, watch=lambda state: state.step == NUM_STEPS - 1)[1]
        assert [row["watched"] is None for row in rows] == [True] * (NUM_STEPS - 1) + [False]
        results[name] = rows[-1]["watched"]
    return results


def plain_layers(run: RunConfig) -> dict[str, dict[str, float]]:
    """Compute the same in plain torch, in one process, from whole tensors before and after the last update."""
    model, names = ReferenceModel(run), [layer.name for layer in gpt_layers(run, OneProcess())]
    optimizer, plan = reference_optimizer(model, run), RunPlan.of(run, world_size=1)
    size = run.megastable.model
    seen: dict[str, dict[str, float]] = {name: {} for name in names}
    for step in range(NUM_STEPS):
        ids, labels = global_batch(step * BATCH, BATCH, size.seq_length, size.vocab_size)
        handles = list(watch_activations(model, names, seen)) if step == NUM_STEPS - 1 else []
        logits = model(ids)[..., : size.vocab_size]
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        for handle in handles:
            handle.remove()
        optimizer.zero_grad()
        loss.backward()
        gradients = {parameter: _gradient(parameter) for parameter in model.parameters()}
        before = {parameter: parameter.detach().clone() for parameter in model.parameters()}
        nn.utils.clip_grad_norm_(model.parameters(), run.clip_norm or math.inf)
        for group in optimizer.param_groups:
            group["lr"] = plan.lr_schedule.at(step * BATCH)
        optimizer.step()
    modules = {name: module for name, (_, module) in zip(names, model.forwards, strict=True)}
    if run.megastable.model.tie_embeddings:
        del modules["head"]
    for name, module in modules.items():
        own = list(module.parameters())
        if own:
            seen[name] |= {
                "grad_norm": norm(gradients[p] for p in own),
                "weight_norm": norm(before[p] for p in own),
                "update_norm": norm(p.detach() - before[p] for p in own),
                "grad_zero_share": sum(int((gradients[p] == 0).sum()) for p in own) / sum(p.numel() for p in own),
            }
            seen[name]["update_ratio"] = seen[name]["update_norm"] / seen[name]["weight_norm"]
    return seen


def _gradient(parameter: nn.Parameter) -> Tensor:
    """Return a copy of the parameter's gradient, which clipping will not scale."""
    assert parameter.grad is not None
    return parameter.grad.clone()


def norm(tensors: Iterator[Tensor]) -> float:
    """Return the norm of all elements of ``tensors`` together."""
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))


def watch_activations(model: ReferenceModel, names: list[str], seen: dict[str, dict[str, float]]) -> Iterator[Any]:
    """Yield the handles of hooks that keep each layer's largest output, and largest product of a query and a key."""
    for name, (forward, module) in zip(names, model.forwards, strict=True):

        def keep(_: nn.Module, inputs: Any, output: Tensor, name: str = name) -> None:
            largest = max(
                float(inputs[0].detach().abs().max()) if name.startswith("block") else 0.0,
                float(output.detach().abs().max()),
            )
            seen[name]["max_activation"] = max(seen[name].get("max_activation", 0.0), largest)

        def keep_output(_: nn.Module, inputs: Any, output: Tensor, name: str = name) -> None:
            keep(_, (torch.zeros(1),), output, name)

        assert name == "head" or forward is None
        watched_module = module.get_submodule("cap") if name == "head" else module
        yield watched_module.register_forward_hook(keep_output)
        for child in module.modules() if name.startswith("block") else []:
            if isinstance(child, ColumnParallelLinear):
                yield child.register_forward_hook(keep_output)
            if isinstance(child, RowParallelLinear):
                yield child.register_forward_hook(keep)
            if isinstance(child, QueryKeyScale):

                def product(_: nn.Module, inputs: Any, output: Any, name: str = name) -> None:
                    q, k = (part.detach() for part in output)
                    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
                    seen[name]["max_attention_logit"] = float((q @ k.transpose(-1, -2)).abs().max())

                yield child.register_forward_hook(product)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_value_of_every_layer_equals_one_process(variant: str) -> None:
    torch.manual_seed(0)
    expected = plain_layers(run_of(variant))
    assert len(expected) == 8 and all("max_activation" in values for values in expected.values())
    for by_layout in run_ranks(watched, world_size=4, variant=variant):
        for layout, found in by_layout.items():
            assert found["layers"].keys() == expected.keys(), layout
            for name, values in expected.items():
                assert found["layers"][name] == pytest.approx(values, rel=1e-4), f"{layout}: {name}"
            largest = max(max(v["max_activation"], v.get("max_attention_logit", 0)) for v in expected.values())
            assert found["headroom"] == pytest.approx(largest / torch.finfo(torch.float32).max, rel=1e-4)
            assert 0 <= found["slowest_rank"] < 4 and 0 < found["slowest_rank_share"] <= 1
            num_stages = LAYOUTS[layout][0]
            assert list(found["stage_busy_seconds"]) == [f"stage_{stage}" for stage in range(num_stages)]
            assert all(seconds > 0 for seconds in found["stage_busy_seconds"].values())
            assert 0.05 < found["host_memory_gib"] < 50


def precisions_watched() -> dict[str, Any]:
    """Watch one step in each format, and one that overflows."""
    common = {"megastable__training__fp16_on_cpu": True, "megastable__pipeline__num_stages": 2}
    formats: dict[str, dict[str, Any]] = {
        "fp16": {"fp16": {"enabled": True, "initial_scale_power": 7}},
        "fp16, overflow": {"fp16": {"enabled": True, "initial_scale_power": 40}},
        "bf16": {"bf16": {"enabled": True}},
        "bf16, fp32 sums": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
        "fp32": {},
    }
    results = {}
    for name, changes in formats.items():
        rows = train(*build_engine(tiny_run(**common, **changes)), 2, watch=lambda state: state.step == 1)[1]
        results[name] = {**rows[-1]["watched"], "grad_norm": rows[-1]["grad_norm"]}
    return results


def test_sixteen_bits_show_unscaled_gradients_and_the_room_that_is_left() -> None:
    results = run_ranks(precisions_watched, world_size=2)[0]
    for name, result in results.items():
        layers = result["layers"]
        if name == "fp16, overflow":
            assert not any("grad_norm" in values for values in layers.values()), "a skipped step has no update"
        else:
            total = math.sqrt(sum(values.get("grad_norm", 0.0) ** 2 for values in layers.values()))
            assert total == pytest.approx(result["grad_norm"], rel=1e-4), name
            assert layers["block_1"]["grad_norm"] == pytest.approx(
                results["fp32"]["layers"]["block_1"]["grad_norm"], rel=5e-2
            ), name
        if name.startswith("fp16"):
            largest = max(max(v["max_activation"], v.get("max_attention_logit", 0)) for v in layers.values())
            assert result["headroom"] == pytest.approx(largest / 65504)


def watching_changes_nothing() -> list[list[list[float]]]:
    """Return losses and norms with every step watched, and with none."""
    results = []
    for watch in (lambda state: True, lambda state: False):
        run = tiny_run(megastable__model__dropout=0.1, megastable__pipeline__num_stages=2)
        rows = train(*build_engine(run), 4, watch=watch)[1]
        results.append([[row["loss"], row["grad_norm"]] for row in rows])
    return results


def test_watching_leaves_the_run_bit_identical() -> None:
    seen, unseen = run_ranks(watching_changes_nothing, world_size=2)[0]
    assert seen == unseen


def moved_since_a_snapshot() -> list[dict[str, float]]:
    """Let one block's weights be half as large again, on whichever rank has them; and one of them not finite."""
    _, engine = build_engine(tiny_run(megastable__pipeline__num_stages=2))
    snapshot = engine.snapshot()
    found = [engine.movement_since(snapshot)]
    for value in (None, torch.nan):
        for partition in engine.model_state.partitions:
            for held in partition.held:
                if held.name.startswith("block_2."):
                    part = partition.master.detach()[slice(*held.span)]
                    part.copy_(1.5 * part if value is None else torch.full_like(part, value))
        found.append(engine.movement_since(snapshot))
    return found


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_layer_that_has_moved_since_a_snapshot_is_known_on_every_rank(world_size: int) -> None:
    for still, moved, broken in run_ranks(moved_since_a_snapshot, world_size=world_size):
        assert set(still.values()) == {0.0} and {"embedding", "block_0", "block_3", "final_norm"} <= still.keys()
        assert moved == pytest.approx({**still, "block_2": 0.5}, rel=1e-5)
        assert broken == {**still, "block_2": math.inf}
