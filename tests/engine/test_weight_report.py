"""The stds that a run reports at its start are those of the whole weights, whatever the layout."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch

from megastable.model.initialise import drawn_modules, formula_std, full_shape
from tests.support.ranks import run_ranks
from tests.support.reference import ReferenceModel
from tests.support.steps import build_engine
from tests.support.tiny_run import tiny_run

RUN: dict[str, Any] = {
    "megastable__model__tie_embeddings": False,
    "megastable__model__position_embedding": "learned",
    "megastable__init": {"embedding_std": 0.3, "head_std": 0.4},
}


def reported_weights() -> dict[str, Any]:
    """Return every kind of weight as the engine reports it, by layout."""
    found = {}
    for num_stages, tensor_size in ((2, 2), (4, 1), (1, 4)):
        parallel = {
            "megastable__pipeline__num_stages": num_stages,
            "megastable__tensor_parallel": {"size": tensor_size},
        }
        _, engine = build_engine(tiny_run(**RUN, **parallel))
        found[f"{num_stages} x {tensor_size}"] = {
            kind.name: [kind.formula_std, kind.measured_std] for kind in engine.weight_kinds()
        }
    return found


def test_every_kind_of_weight_is_reported_over_all_ranks() -> None:
    run = tiny_run(**RUN)
    weights, formulas = defaultdict(list), {}
    for layer in ReferenceModel(run).children():
        for name, module in drawn_modules(layer):
            kind = f"{type(layer).__name__}.{name}".rstrip(".")
            # What pads the vocabulary is not drawn.
            drawn = module.weight.detach()[: full_shape(module)[0]]
            weights[kind].append(drawn.flatten().double())
            formulas[kind] = formula_std(layer, module, run)
    measured = {kind: float(torch.cat(parts).std(correction=0)) for kind, parts in weights.items()}
    assert (formulas["VocabularyEmbedding"], formulas["OutputHead.linear"]) == (0.3, 0.4) and len(formulas) == 7
    for by_layout in run_ranks(reported_weights, world_size=4):
        for layout, found in by_layout.items():
            assert found == {kind: pytest.approx([formulas[kind], measured[kind]]) for kind in formulas}, layout
