"""Models that come and go: transformers -> import -> any layout -> export -> the same tensors, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.interop.moved_models import STEP_0, Notes, assert_same_tensors, exported, imported, resave, save_theirs
from tests.interop.their_models import VARIANT_NAMES, VARIANTS
from tests.support.ranks import run_ranks

DEEP: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": 4}, "bloom": {"n_layer": 4}, "gpt_neox": {"num_hidden_layers": 4},
    "llama": {"num_hidden_layers": 4, "num_key_value_heads": 2},
}  # fmt: skip
LAYOUTS = [(1, 1, 1), (2, 1, 1), (4, 1, 1), (1, 1, 2), (2, 1, 2), (2, 2, 1), (1, 4, 1)]
"""Stages, replicas, tensor ranks."""
QUICK = [("llama", (2, 1, 2)), ("gpt_neox", (4, 1, 1))]


@pytest.mark.parametrize(("family", "keys"), VARIANTS, ids=VARIANT_NAMES)
def test_what_was_imported_is_exported_to_the_bit(family: str, keys: dict[str, Any], tmp_path: Path) -> None:
    save_theirs(tmp_path / "theirs", family, **keys)
    imported(tmp_path, tmp_path / "theirs")
    notes = Notes()
    exported(tmp_path / "run", tmp_path / "out", notes, verify=True)
    assert_same_tensors(tmp_path / "out", tmp_path / "theirs")
    assert any(text.startswith("verified: largest difference") for text in notes.texts), notes.texts
    assert notes.done == notes.totals


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_come_back_as_they_were(dtype: torch.dtype, tmp_path: Path) -> None:
    save_theirs(tmp_path / "theirs", "llama", dtype)
    run = imported(tmp_path, tmp_path / "theirs")
    assert run.bf16.enabled
    name = {torch.bfloat16: None, torch.float16: "fp16"}[dtype]  # bf16 is the run's own
    exported(tmp_path / "run", tmp_path / "out", number_format=name, verify=True)
    assert_same_tensors(tmp_path / "out", tmp_path / "theirs")


def through(layout: tuple[int, int, int], family: str, folder: Path) -> None:
    """Import, train no step on a layout, export, and compare."""
    stages, replicas, tensor = layout
    save_theirs(folder / "theirs", family, **DEEP[family])
    imported(folder, folder / "theirs")
    overrides = [f"megastable.pipeline.num_stages={stages}", f"megastable.tensor_parallel.size={tensor}"]
    saved = run_ranks(
        resave, stages * replicas * tensor,
        checkpoint=str(folder / "run" / STEP_0), folder=str(folder / "saved"), overrides=overrides,
    )  # fmt: skip
    exported(Path(saved[0]), folder / "out")
    assert_same_tensors(folder / "out", folder / "theirs")


@pytest.mark.parametrize(("family", "layout"), QUICK, ids=str)
def test_a_model_goes_through_a_layout_to_the_bit(family: str, layout: tuple[int, int, int], tmp_path: Path) -> None:
    through(layout, family, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("family", DEEP)
def test_every_family_goes_through_every_layout(family: str, layout: tuple[int, int, int], tmp_path: Path) -> None:
    through(layout, family, tmp_path)
