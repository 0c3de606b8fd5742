"""The number of weights that is computed from the sizes is that of the built model."""

from __future__ import annotations

from typing import Any

import pytest

from megastable.planning.preflight.review import count_parameters
from tests.support.reference import ReferenceModel
from tests.support.tiny_run import tiny_run


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_embeddings": False},
        {"position_embedding": "learned"},
        {"embedding_norm": True},
        {"norm": "rmsnorm"},
        {"activation": "swiglu", "ffn_hidden_size": 96},
        {"num_key_value_heads": 2},
    ],
    ids=lambda changes: next(iter(changes), "plain"),
)
def test_the_count_is_the_built_models(changes: dict[str, Any]) -> None:
    run = tiny_run(**{f"megastable__model__{key}": value for key, value in changes.items()})
    built = sum(parameter.numel() for parameter in ReferenceModel(run).parameters())
    assert count_parameters(run.megastable.model) == built
