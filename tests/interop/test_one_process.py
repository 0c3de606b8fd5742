"""A checkpoint of any model, also one that no class of transformers has, computes in one process as its layers do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megastable.config import run_as_dict
from megastable.core.records import TrainingState
from megastable.interop.one_process import load_model
from megastable.interop.saved_model import open_saved_model
from tests.support.ranks import run_ranks
from tests.support.reference import ReferenceModel
from tests.support.tiny_run import tiny_run

MODEL: dict[str, Any] = {
    "qk_norm": True, "embedding_norm": True, "activation": "swiglu", "position_embedding": "learned",
    "tie_embeddings": False, "output_logit_cap": 20.0,
}  # fmt: skip


def save_fresh(folder: str) -> str:
    """Save the drawn weights of a model over two tensor ranks, with its loss in chunks; on every rank."""
    from tests.support.steps import build_engine, save_now

    run = tiny_run(
        **{f"megastable__model__{key}": value for key, value in MODEL.items()},
        megastable__tensor_parallel={"size": 2}, megastable__training__loss_chunk_tokens=8,
    )  # fmt: skip
    _, engine = build_engine(run)
    return str(save_now(engine, Path(folder), TrainingState(step=1), run=run_as_dict(run)))


def test_the_logits_are_those_of_the_layers(tmp_path: Path) -> None:
    checkpoint, _ = run_ranks(save_fresh, 2, folder=str(tmp_path))
    saved = open_saved_model(Path(checkpoint), lambda text: None)
    run = tiny_run(**{f"megastable__model__{key}": value for key, value in MODEL.items()})
    token_ids = torch.randint(300, (2, 16), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        found = load_model(saved)(token_ids)
        expected = ReferenceModel(run)(token_ids)[..., :300]
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
