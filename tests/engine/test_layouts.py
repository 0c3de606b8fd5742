"""A checkpoint of any layout continues on any other, as if the run had not been interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megastable.checkpoints.folder import folder_name
from megastable.checkpoints.verify import verify
from megastable.core.records import TrainingState
from megastable.engine.checkpoint_tensors import KINDS
from megastable.engine.training_engine import TrainingEngine
from tests.support.ranks import run_ranks
from tests.support.steps import build_engine, load, save_now, train
from tests.support.tiny_run import tiny_run

# Grouped queries with fewer key-value heads than tensor ranks, a fused gate, a vocabulary that is padded.
MODEL: dict[str, Any] = {
    "megastable__model__num_layers": 4,
    "megastable__model__num_attention_heads": 4,
    "megastable__model__num_key_value_heads": 1,
    "megastable__model__activation": "swiglu",
    "megastable__model__vocab_size": 261,
    "megastable__model__vocab_padding_multiple": 16,
    "megastable__batch_rampup": {"steps": [[0, 8], [32, 16]]},
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "1 stage": (1, {}),
    "2 stages": (2, {"megastable__pipeline__num_stages": 2}),
    "2 replicas": (2, {}),
    "2 tensor": (2, {"megastable__tensor_parallel__size": 2}),
    "4 stages": (4, {"megastable__pipeline__num_stages": 4}),
    "4 replicas": (4, {}),
    "2 stages, 2 replicas": (4, {"megastable__pipeline__num_stages": 2}),
    "2 stages, 2 replicas, uneven": (
        4, {"megastable__pipeline__num_stages": 2, "megastable__pipeline__partition": [3, 1]},
    ),
    "2 stages, 2 tensor": (4, {"megastable__pipeline__num_stages": 2, "megastable__tensor_parallel__size": 2}),
    "2 replicas, 2 tensor": (4, {"megastable__tensor_parallel__size": 2}),
    "2 tensor, sequence": (
        2, {"megastable__tensor_parallel__size": 2, "megastable__tensor_parallel__sequence_parallel": True},
    ),
}  # fmt: skip
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "bf16, fp32 sums": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}, "megastable__training__fp16_on_cpu": True},
}
SAVE_AT = 3
"""Before the batch grows at step 4."""


def _engine(layout: str, precision: str = "fp32", **changes: Any) -> tuple[Any, TrainingEngine]:
    return build_engine(tiny_run(**MODEL, **LAYOUTS[layout][1], **PRECISIONS[precision], **changes))


def saved_on(layouts: list[str], folder: str) -> None:
    """Train to the save on each layout."""
    for layout in layouts:
        plan, engine = _engine(layout)
        state, _ = train(plan, engine, SAVE_AT)
        save_now(engine, Path(folder) / layout, state)


def continued_on(layouts: list[str], sources: list[str], folder: str, num_steps: int) -> dict[str, Any]:
    """Continue the checkpoint of every source on each layout; return losses and norms by (source, layout)."""
    results = {}
    for layout in layouts:
        # One engine for all sources: each has groups of its own, whose threads poll for as long as the process lives.
        plan, engine = _engine(layout)
        for source in sources:
            torch.manual_seed(99)
            state = load(engine, Path(folder) / source / folder_name(SAVE_AT))
            assert engine.check_consistency()[0] == []
            results[f"{source} -> {layout}"] = _values(train(plan, engine, num_steps, state)[1])
    return results


def uninterrupted(num_steps: int) -> list[list[float]]:
    """Train on one process, without a stop."""
    return _values(train(*_engine("1 stage"), num_steps)[1])


def _values(rows: list[dict[str, Any]]) -> list[list[float]]:
    return [[row["loss"], row["grad_norm"], row["global_batch_size"]] for row in rows]


def _by_world_size(layouts: list[str]) -> dict[int, list[str]]:
    groups: dict[int, list[str]] = {}
    for layout in layouts:
        groups.setdefault(LAYOUTS[layout][0], []).append(layout)
    return groups


def _check_matrix(folder: Path, sources: list[str], targets: list[str], num_steps: int) -> None:
    (expected,) = run_ranks(uninterrupted, world_size=1, num_steps=SAVE_AT + num_steps)
    for world_size, layouts in _by_world_size(sources).items():
        run_ranks(saved_on, world_size, layouts=layouts, folder=str(folder))
    for source in sources:
        assert verify(folder / source / folder_name(SAVE_AT)) == []
    continued: dict[str, Any] = {}
    for world_size, layouts in _by_world_size(targets).items():
        ranks = run_ranks(
            continued_on, world_size, 900, layouts=layouts, sources=sources, folder=str(folder), num_steps=num_steps
        )
        continued |= ranks[0]
    assert len(continued) == len(sources) * len(targets)
    for name, rows in continued.items():
        for row, whole in zip(rows, expected[SAVE_AT:], strict=True):
            assert row == pytest.approx(whole, rel=1e-5), name


def test_representative_layouts_continue_one_another(tmp_path: Path) -> None:
    sources = ["2 stages, 2 replicas, uneven", "2 replicas, 2 tensor"]
    _check_matrix(tmp_path, sources, ["1 stage", "2 stages, 2 tensor", "2 replicas"], num_steps=4)


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
def test_every_layout_continues_every_other_for_twenty_steps(tmp_path: Path) -> None:
    _check_matrix(tmp_path, list(LAYOUTS), list(LAYOUTS), num_steps=20)


# To the bit


def whole_state(engine: TrainingEngine) -> list[dict[str, Tensor]]:
    """Copy all flat tensors."""
    return [{kind: flat.clone() for kind, flat in group.items()} for group in engine.model_state.flats()]


def states_of_other_precisions(folder: str) -> dict[str, bool]:
    """Save in every precision, load into every other, and compare masters and moments to the bit."""
    equal = {}
    for written in PRECISIONS:
        plan, engine = _engine("2 stages", written)
        state, _ = train(plan, engine, 2)
        before = whole_state(engine)
        saved = save_now(engine, Path(folder) / written, state)
        for read in PRECISIONS:
            plan, engine = _engine("2 stages", read)
            state = load(engine, saved)
            after = whole_state(engine)
            same = all(torch.equal(a[kind], b[kind]) for a, b in zip(before, after, strict=True) for kind in KINDS)
            rows = train(plan, engine, 1, state)[1]
            equal[f"{written} -> {read}"] = same and not rows[0]["skipped"]
    return equal


def test_any_precision_continues_any_other(tmp_path: Path) -> None:
    for equal in run_ranks(states_of_other_precisions, world_size=2, folder=str(tmp_path)):
        assert equal == dict.fromkeys(equal, True)
        assert len(equal) == len(PRECISIONS) ** 2


def snapshots_restored(layouts: list[str]) -> dict[str, bool]:
    """Take steps after a snapshot, with dropout; go back, and take them again, in every precision."""
    same = {}
    for layout in layouts:
        for precision in PRECISIONS:
            plan, engine = _engine(layout, precision, megastable__model__dropout=0.1)
            state, _ = train(plan, engine, 2)
            snapshot = engine.snapshot()
            first = train(plan, engine, 3, state)[1]
            # What a rollback is for: weights and scale that were led astray.
            train(plan, engine, 1, TrainingState(step=5, consumed_samples=40))
            engine.restore(snapshot)
            again = train(plan, engine, 3, state)[1]
            engine.restore(engine.snapshot(reused=snapshot))
            last = train(plan, engine, 1, TrainingState(step=5, consumed_samples=40))[1]
            same[f"{layout}, {precision}"] = _values(first) == _values(again) and last[0]["loss"] > 0
    return same


@pytest.mark.slow
def test_a_snapshot_brings_the_run_back_to_the_bit() -> None:
    layouts = ["2 stages, 2 replicas", "2 stages, 2 tensor", "4 replicas"]
    for same in run_ranks(snapshots_restored, world_size=4, layouts=layouts):
        assert same == dict.fromkeys(same, True)
