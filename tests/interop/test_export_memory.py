"""An export takes the memory of the largest tensor, however many there are."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers
from reshaping_load import extra_of

from megastable.data.text_tokenizers import BytesTokenizer
from tests.interop.moved_models import exported, imported
from tests.support.ranks import run_ranks

FEW, MANY = 2, 12
HIDDEN, INNER = 256, 1024
KEPT_BYTES = 2**22
"""By libraries, such as the tokenizer; for the smaller model as well."""


def extra_of_moving(folder: str) -> list[list[int]]:
    """Import and export a model of few and one of many blocks; return the most anonymous bytes that each took."""
    found: list[list[int]] = []
    for layers in (FEW, FEW, MANY):  # the first time, modules are loaded
        theirs = Path(folder) / str(layers)
        target = Path(folder) / f"moved-{layers}-{len(found)}"
        target.mkdir()
        read = extra_of(lambda: imported(target, theirs))  # noqa: B023 - called at once
        written = extra_of(lambda: exported(target / "run", target / "out"))  # noqa: B023
        found.append([read.anonymous, written.anonymous])
    return found[1:]


def test_the_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    for layers in (FEW, MANY):
        config = transformers.LlamaConfig(
            vocab_size=300, hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=layers,
            num_attention_heads=4, max_position_embeddings=16,
        )  # fmt: skip
        transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / str(layers))
        BytesTokenizer().save(tmp_path / str(layers))
    ((few, many),) = run_ranks(extra_of_moving, 1, folder=str(tmp_path))
    largest = 2 * INNER * HIDDEN * 4  # gate and path of a feed-forward layer, fused, in fp32
    # The blocks that the larger one has more are twenty times the largest tensor, and their moments forty times more.
    for of_few, of_many in zip(few, many, strict=True):
        assert of_many - of_few < 4 * largest, (few, many, largest)
        assert of_many < 4 * largest + KEPT_BYTES, (few, many, largest)


def test_the_measure_would_see_a_copy_of_the_model() -> None:
    kept: list[bytearray] = []
    assert extra_of(lambda: kept.append(bytearray(2**24))).anonymous == pytest.approx(2**24, rel=0.3)
