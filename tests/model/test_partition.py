"""The flat list that stages are cut from is that of the model, and DeepSpeed's methods cut as DeepSpeed does."""

from __future__ import annotations

from typing import Any

import pytest
from deepspeed.runtime.utils import partition_balanced, partition_uniform
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.config.stages import StageCut
from megastable.core.partition import deepspeed_balanced, deepspeed_uniform, stage_bounds
from megastable.model.layers import gpt_layers
from megastable.model.tensor_parallel import OneProcess
from tests.support.tiny_run import tiny_run

quick = settings(max_examples=25, deadline=None)
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "untied": {"tie_embeddings": False},
    "learned positions, embedding norm": {"position_embedding": "learned", "embedding_norm": True},
    "learned positions": {"position_embedding": "learned"},
    "embedding norm": {"embedding_norm": True},
    "normed queries and keys, rmsnorm": {"qk_norm": True, "norm": "rmsnorm"},
    "swiglu, grouped heads": {"activation": "swiglu", "num_key_value_heads": 2, "qk_norm": True},
}


@pytest.mark.parametrize("model", MODELS)
def test_names_classes_and_weights_are_those_of_the_built_layers(model: str) -> None:
    run = tiny_run(**{f"megastable__model__{key}": value for key, value in MODELS[model].items()})
    sections = run.megastable
    cut = StageCut.of(sections.model, sections.pipeline, sections.tensor_parallel)
    built = [(layer, list(layer.build(run).parameters())) for layer in gpt_layers(run, OneProcess())]
    assert [
        (layer.name, layer.kind, layer.class_name, layer.num_parameters, layer.has_matrices, layer.has_vectors)
        for layer in cut.layers
    ] == [
        (
            layer.name,
            layer.kind,
            layer.module_class.__name__,
            sum(weight.numel() for weight in weights),
            any(weight.dim() > 1 for weight in weights),
            any(weight.dim() <= 1 for weight in weights),
        )
        for layer, weights in built
    ]


@quick
@given(st.lists(st.integers(0, 40) | st.integers(0, 10**10), min_size=1, max_size=14), st.integers(1, 8))
def test_bounds_are_deepspeeds_own(weights: list[int], num_parts: int) -> None:
    assert list(deepspeed_uniform(len(weights), num_parts)) == partition_uniform(len(weights), num_parts)
    assert list(deepspeed_balanced(weights, num_parts)) == partition_balanced(weights, num_parts)


@pytest.mark.parametrize("num_stages", range(1, 6))
@pytest.mark.parametrize("model", MODELS)
def test_the_models_bounds_are_deepspeeds_own(model: str, num_stages: int) -> None:
    run = tiny_run(**{f"megastable__model__{key}": value for key, value in MODELS[model].items()})
    sections = run.megastable
    layers = StageCut.of(sections.model, sections.pipeline, sections.tensor_parallel).layers
    weights = {
        "uniform": [1] * len(layers),
        "parameters": [layer.num_parameters for layer in layers],
        "type:transformer": [int(layer.class_name == "TransformerBlock") for layer in layers],
    }
    for method, own in weights.items():
        expected = (
            partition_uniform(len(layers), num_stages) if method == "uniform" else partition_balanced(own, num_stages)
        )
        assert list(stage_bounds(layers, num_stages, method)) == list(expected), method
