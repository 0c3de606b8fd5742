"""A load of another layout takes no more memory beside the state than one block has, however many blocks there are."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from reshaping_load import block_bytes, build, extra_of_load, save

from tests.support.ranks import run_ranks

FEW, MANY = 4, 16
SIZES = {"hidden": 256, "seq_length": 16}


def saved(folder: str, num_stages: int) -> None:
    """Save a model of few and one of many blocks."""
    for layers in (FEW, MANY):
        _, engine = build(argparse.Namespace(layers=layers, **SIZES), num_stages)
        save(engine, Path(folder) / str(layers))


def extras(folder: str, num_stages: int) -> list[int]:
    """Load both, and return the most bytes that each load took beside the state."""
    found = []
    for layers in (FEW, MANY):
        _, engine = build(argparse.Namespace(layers=layers, **SIZES), num_stages)
        found.append(extra_of_load(engine, Path(folder) / str(layers)).resident)
    return found


@pytest.mark.parametrize(
    ("written", "read"), [((4, 2), (1, 1)), ((1, 1), (2, 2))], ids=["2x2 to 1x1", "1x1 to 2 stages"]
)
def test_the_memory_of_a_reshaping_load_does_not_grow_with_the_model(
    written: tuple[int, int], read: tuple[int, int], tmp_path: Path
) -> None:
    run_ranks(saved, written[0], folder=str(tmp_path), num_stages=written[1])
    block = block_bytes(argparse.Namespace(**SIZES))
    for few, many in run_ranks(extras, read[0], folder=str(tmp_path), num_stages=read[1]):
        # A load that kept what it has read would take six or twelve blocks more.
        assert many - few < block, (few, many, block)
        assert many < 1.5 * block, (few, many, block)
