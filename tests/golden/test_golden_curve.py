"""A recorded curve: a change that is not meant to move the loss does not.

When a change is meant to move it, record anew and say why in the commit: ``python -m tests.golden.record``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import run_ranks
from tests.support.steps import build_engine, train
from tests.support.tiny_run import tiny_run

CURVE = Path(__file__).with_name("tiny_fp32.json")
NUM_STEPS = 30


def golden_steps() -> list[dict[str, Any]]:
    """Take the recorded run: fp32 on one process, the ramp from 4 to 12 samples, the whole cosine."""
    run = tiny_run(megastable__training={"total_steps": NUM_STEPS, "seed": 7})
    rows = train(*build_engine(run), NUM_STEPS)[1]
    return [{name: row[name] for name in ("loss", "grad_norm", "lr", "global_batch_size")} for row in rows]


def test_the_curve_has_not_moved() -> None:
    expected = json.loads(CURVE.read_text())
    measured = run_ranks(golden_steps, world_size=1)[0]
    for name in ("global_batch_size", "lr"):
        assert [row[name] for row in measured] == pytest.approx([row[name] for row in expected], rel=1e-12)
    # Other processors add up in another order; a real change is larger than this.
    for name in ("loss", "grad_norm"):
        assert [row[name] for row in measured] == pytest.approx([row[name] for row in expected], rel=2e-4)
