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
    block_bytes = 4 * (4 * HIDDEN**2 + 3 * HIDDEN * INNER)
    # Tokenizer and allocator take a few MB more or less; one copy of the blocks that the larger model has more, 40 MB.
    for of_few, of_many in zip(few, many, strict=True):
        assert of_many - of_few < (MANY - FEW) * block_bytes / 4, (few, many)
        assert of_many < MANY * block_bytes / 2, (few, many)


def test_the_measure_would_see_a_copy_of_the_model() -> None:
    kept: list[bytearray] = []
    assert extra_of(lambda: kept.append(bytearray(2**24))).anonymous == pytest.approx(2**24, rel=0.3)
