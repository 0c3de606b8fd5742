"""The registries of parts: the same names in core, in the model and in run files, and numbers that are the modules'.

A toy kind of every part then shows what a new kind takes: a record, a module, and a line for each.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from megastable.config import ConfigError, ModelConfig, RunConfig
from megastable.config.stages import StageCut, model_parts, model_shape
from megastable.core.activations import ActivationSettings, block_bytes_per_token
from megastable.core.layers import LayerKind, num_parameters
from megastable.core.model_parts import ATTENTION_KINDS, FEED_FORWARD_KINDS, NORM_KINDS, POSITION_KINDS
from megastable.model.attention import ATTENTION_BACKENDS
from megastable.model.block import FEED_FORWARDS
from megastable.model.layers import Layer, gpt_layers
from megastable.model.positions import POSITION_EMBEDDINGS
from megastable.model.residual_stream import NORMS
from megastable.model.tensor_parallel import OneProcess
from megastable.planning.memory import stage_memory
from megastable.planning.run_plan import RunPlan
from tests.support import toy_parts
from tests.support.reference import ReferenceModel, train_reference
from tests.support.tiny_run import tiny_run

REGISTRIES: dict[str, tuple[Mapping[str, object], Mapping[str, object]]] = {
    "activation": (FEED_FORWARD_KINDS, FEED_FORWARDS),
    "norm": (NORM_KINDS, NORMS),
    "position_embedding": (POSITION_KINDS, POSITION_EMBEDDINGS),
    "attention": (ATTENTION_KINDS, ATTENTION_BACKENDS),
}
"""Key of a run file -> its registry in core, and that in the model."""
KINDS = [(key, name) for key, (numbers, _) in REGISTRIES.items() for name in numbers]
SIZES = {"megastable__model__hidden_size": 256, "megastable__model__seq_length": 32, "megastable__model__num_layers": 1}
"""Large enough that what a kernel keeps of a row, such as the variance of a norm, is next to nothing."""


@pytest.fixture
def toys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Know the toys for one test."""
    for registry, entry in toy_parts.ENTRIES:
        monkeypatch.setitem(registry, toy_parts.NAME, entry)


def run_with(**changes: Any) -> RunConfig:
    """Return a tiny run of sizes at which kept bytes can be compared."""
    return tiny_run(**SIZES, **changes)


@pytest.mark.parametrize("key", REGISTRIES)
def test_core_the_model_and_run_files_know_the_same_names(key: str) -> None:
    numbers, modules = REGISTRIES[key]
    assert sorted(numbers) == sorted(modules)
    assert legal_names(key) == list(numbers)


def legal_names(key: str) -> Collection[str]:
    """Return the names that an editor offers for the key."""
    names: list[str] = ModelConfig.model_json_schema()["properties"][key]["enum"]
    return names


@pytest.mark.parametrize("key", REGISTRIES)
@pytest.mark.parametrize("value", ["nonesuch", 3, True, ["rotary"], {"type": "gelu"}])
def test_another_value_is_refused_with_the_names_that_there_are(key: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        tiny_run(**{f"megastable__model__{key}": value})
    (fault,) = caught.value.faults
    assert fault.path == f"megastable.model.{key}"
    assert fault.message == f"must be one of {', '.join(repr(name) for name in REGISTRIES[key][0])}"


def first_block(run: RunConfig) -> Layer:
    """Return the first block of the list."""
    return next(layer for layer in gpt_layers(run, OneProcess()) if layer.kind is LayerKind.BLOCK)


def kept_bytes(run: RunConfig) -> int:
    """Measure what a block keeps of a micro-batch of three samples, weights and shared tables left out."""
    model = run.megastable.model
    block = first_block(run).build(run)
    x = torch.randn(3, model.seq_length, model.hidden_size, requires_grad=True)
    storages: dict[int, int] = {}
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        kept.append(tensor)  # so that no freed address is used again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        block(x)
    weights = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}
    return sum(size for pointer, size in storages.items() if pointer not in weights)


def assert_bytes_are_those_that_a_block_keeps(run: RunConfig) -> None:
    model = run.megastable.model
    settings = ActivationSettings(element_bytes=4, recomputed=(), on_cpu=True)
    of_token = block_bytes_per_token(model_shape(model), model_parts(model), settings)
    assert kept_bytes(run) == pytest.approx(3 * model.seq_length * of_token, rel=0.015)


def assert_operations_are_those_that_run(run: RunConfig) -> None:
    """Of a forward pass with two products for attention; a fused kernel credits what it masks."""
    model = run.megastable.model
    shape = model_shape(model)
    reference = ReferenceModel(run)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        reference(torch.zeros(3, model.seq_length, dtype=torch.long))
    assert counter.get_total_flops() == 3 * (model.num_layers * shape.block_forward_flops + shape.head_forward_flops)


def assert_weights_are_those_of_the_built_layers(run: RunConfig) -> None:
    """Layer by layer, and of the whole."""
    sections = run.megastable
    cut = StageCut.of(sections.model, sections.pipeline, sections.tensor_parallel)
    for flat, layer in zip(cut.layers, gpt_layers(run, OneProcess()), strict=True):
        weights = list(layer.build(run).parameters())
        assert flat.num_parameters == sum(weight.numel() for weight in weights), layer.name
        assert flat.has_matrices == any(weight.dim() > 1 for weight in weights), layer.name
        assert flat.has_vectors == any(weight.dim() == 1 for weight in weights), layer.name
    whole = sum(parameter.numel() for parameter in ReferenceModel(run).parameters())
    assert num_parameters(model_shape(sections.model), model_parts(sections.model)) == whole


@pytest.mark.parametrize(("key", "name"), KINDS)
def test_the_numbers_of_a_kind_are_those_of_its_module(key: str, name: str) -> None:
    # Learned positions, so that no rotation stands between the projection and what the backward pass keeps of it.
    plain = {"megastable__model__position_embedding": "learned"} | {f"megastable__model__{key}": name}
    if name != "rotary":  # which keeps the attention's output a second time, in the order of its heads
        assert_bytes_are_those_that_a_block_keeps(run_with(**plain))
    run = run_with(**{"megastable__model__attention": "math", **plain, "megastable__model__embedding_norm": True})
    assert_weights_are_those_of_the_built_layers(run)
    if ATTENTION_KINDS[run.megastable.model.attention].keeps_weights:
        assert_operations_are_those_that_run(run)


@pytest.mark.parametrize(
    "switches",
    [
        {"linear_biases": False},
        {"parallel_residual": True},
        {"linear_biases": False, "parallel_residual": True, "activation": "swiglu", "norm": "rmsnorm"},
    ],
    ids=str,
)
def test_the_numbers_of_a_switch_are_those_of_the_block(switches: dict[str, Any]) -> None:
    changes = {f"megastable__model__{key}": value for key, value in switches.items()}
    run = run_with(megastable__model__position_embedding="learned", megastable__model__attention="math", **changes)
    assert_bytes_are_those_that_a_block_keeps(run)
    assert_weights_are_those_of_the_built_layers(run)
    assert_operations_are_those_that_run(run)


@pytest.mark.parametrize("name", POSITION_KINDS)
def test_a_position_embedding_has_the_table_and_the_bias_that_core_counts(name: str) -> None:
    model = tiny_run(megastable__model__position_embedding=name).megastable.model
    built = POSITION_EMBEDDINGS[name](model, OneProcess())
    kind = POSITION_KINDS[name]
    assert (built.make_table() is not None) == kind.has_table
    heads = len(built.bias.get(model.seq_length, torch.device("cpu"), torch.float32))
    assert heads == (model.num_attention_heads if kind.bias_per_head else 1)


def test_the_toys_are_unknown_until_they_are_registered() -> None:
    with pytest.raises(ConfigError) as caught:
        tiny_run(**toy_parts.RUN_FILE_KEYS)
    assert len(caught.value.faults) == len(toy_parts.RUN_FILE_KEYS)


@pytest.mark.usefixtures("toys")
def test_a_fault_lists_a_kind_that_was_added() -> None:
    with pytest.raises(ConfigError, match="must be one of 'gelu', 'gelu_exact', 'swiglu', 'toy'"):
        tiny_run(megastable__model__activation="nonesuch")
    assert toy_parts.NAME in legal_names("activation"), "an editor does not offer it"
    with pytest.raises(ConfigError, match="must be auto or math with attention_logit_cap"):
        tiny_run(megastable__model__attention="toy", megastable__model__attention_logit_cap=30.0)


@pytest.mark.usefixtures("toys")
@pytest.mark.parametrize("key", toy_parts.RUN_FILE_KEYS)
def test_a_kind_of_any_part_takes_a_record_a_module_and_their_lines(key: str) -> None:
    assert_a_run_works(key)


@pytest.mark.usefixtures("toys")
def test_kinds_of_all_parts_work_together() -> None:
    assert_a_run_works(*toy_parts.RUN_FILE_KEYS)


def assert_a_run_works(*keys: str) -> None:
    """Load a file that names toys under ``keys``, count all that is counted, plan it, and train three steps."""
    changes: dict[str, str] = {
        "megastable__model__position_embedding": "learned",
        "megastable__model__attention": "math",
        **{key: toy_parts.NAME for key in keys},
    }
    run = run_with(**changes)
    assert_weights_are_those_of_the_built_layers(run)
    assert_bytes_are_those_that_a_block_keeps(run)
    assert_operations_are_those_that_run(run)
    plan = RunPlan.of(run, world_size=1)
    (memory,) = stage_memory(plan, on_cpu=True)
    weights = sum(parameter.numel() for parameter in ReferenceModel(run).parameters())
    assert memory.weights == 4 * weights and memory.activations > 0
    steps, model = train_reference(tiny_run(**changes), num_steps=3)
    assert all(0 < step.loss < 10 and step.grad_norm > 0 for step in steps)
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())


@pytest.mark.usefixtures("toys")
def test_the_toys_are_what_is_built_and_drawn() -> None:
    run = run_with(**toy_parts.RUN_FILE_KEYS)
    model = ReferenceModel(run)
    kinds = {type(module) for module in model.modules()}
    assert {toy_parts.ToyFeedForward, toy_parts.ToyNorm} <= kinds
    weights = dict(model.named_parameters())
    assert weights["1.positions.weight"].shape == (32, 256)
    assert weights["2.feed_forward.input.weight"].shape == (3 * 5 * 256, 256)
    # Half of 1 / sqrt(fan in); residual outputs by the root of twice the one layer as well.
    assert weights["2.feed_forward.input.weight"].std().item() == pytest.approx(0.5 / 256**0.5, rel=0.02)
    residual = 0.5 / (5 * 256) ** 0.5 / 2**0.5
    assert weights["2.feed_forward.output.weight"].std().item() == pytest.approx(residual, rel=0.02)


@pytest.mark.usefixtures("toys")
def test_an_attention_bias_of_a_kind_that_was_added_is_in_the_forecast() -> None:
    changes = {**toy_parts.RUN_FILE_KEYS, "megastable__model__position_embedding": "learned"}
    activations = []
    for run in (run_with(**changes), run_with(**toy_parts.RUN_FILE_KEYS)):
        (memory,) = stage_memory(RunPlan.of(run, world_size=1), on_cpu=True)
        activations.append(memory.activations)
    assert activations[1] - activations[0] == 4 * 4 * 32**2  # four heads in fp32
