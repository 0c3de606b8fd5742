"""A manifest is what was written, or one message."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from megastable.checkpoints.manifest import (
    LARGEST_COUNT,
    MANIFEST_NAME,
    LayoutRecord,
    Manifest,
    PieceRecord,
    RollbackRecord,
    ScalerRecord,
    StateRecord,
    TensorRecord,
    read_manifest,
    write_manifest,
)
from megastable.core.errors import UserError
from megastable.core.records import Rollback, TrainingState
from tests.unit.checkpoints.checkpoint_examples import FIRST, SECOND, make_checkpoint, manifest_of

quick = settings(max_examples=50, deadline=None)  # no deadline: the machine may be busy

counts = st.integers(0, LARGEST_COUNT)
steps = st.integers(0, 10**9)
rollbacks = st.builds(RollbackRecord, from_step=steps, to_step=steps, first_sample=counts, next_sample=counts)
texts = st.text(st.characters(codec="utf-8"), max_size=8)
scalars = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | texts
memories = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3), max_leaves=8
)


@quick
@given(
    st.builds(
        TrainingState, steps, st.just(LARGEST_COUNT), counts, counts, st.just(0), counts,
        st.lists(st.builds(Rollback, steps, steps, counts, counts), max_size=3).map(tuple),
    )
)  # fmt: skip
def test_a_state_survives_a_checkpoint(state: TrainingState) -> None:
    record = StateRecord.model_validate_json(StateRecord.of(state).model_dump_json())
    assert record.to_training_state() == state


@st.composite
def manifests(draw: st.DrawFn, folder: Path) -> Manifest:
    """Draw a manifest that a run might write."""
    step = draw(st.integers(0, 10**9))
    consumed = draw(counts)
    state = StateRecord(
        step=step,
        consumed_samples=consumed,
        applied_samples=draw(st.integers(0, consumed)),
        consumed_tokens=draw(counts),
        skipped_steps=draw(st.integers(0, step)),
        left_out_samples=draw(counts),
        rollbacks=tuple(
            draw(
                st.lists(
                    st.builds(RollbackRecord, from_step=steps, to_step=steps, first_sample=counts, next_sample=counts),
                    max_size=2,
                )
            )
        ),
    )
    return manifest_of(
        step,
        folder,
        state=state,
        run=draw(st.dictionaries(texts, memories, max_size=2)),
        versions=draw(st.dictionaries(texts, texts, max_size=2)),
        monitors=draw(st.dictionaries(texts, st.dictionaries(texts, memories, max_size=2), max_size=3)),
        loss_scaler=draw(st.none() | scalers),
        loss=draw(st.none() | st.floats(allow_nan=False)),
        eval_loss=draw(st.none() | st.floats(allow_nan=False)),
        optimizer_steps=draw(counts),
        tensors=draw(st.dictionaries(texts, tensors(), max_size=3)),
    )


scalers = st.builds(
    ScalerRecord,
    cur_scale=st.floats(0, exclude_min=True, allow_nan=False, allow_infinity=False),
    cur_iter=counts,
    last_overflow_iter=st.just(-1) | counts,
    cur_hysteresis=counts,
)


@st.composite
def tensors(draw: st.DrawFn) -> TensorRecord:
    """Draw a tensor that is cut into shards, and the shards into pieces of two files."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    dim = draw(st.integers(0, len(shape) - 1))
    # Every index along the dim belongs to one of the shards, and neighbours of one shard make a range.
    owners = draw(st.lists(st.integers(0, 2), min_size=shape[dim], max_size=shape[dim]))
    pieces = []
    for owner in set(owners):
        ranges = tuple((index, index + 1) for index, other in enumerate(owners) if other == owner)
        elements = len(ranges)
        for other_dim, size in enumerate(shape):
            elements *= size if other_dim != dim else 1
        cut = draw(st.integers(0, elements))
        for file, start, stop in ((FIRST, 0, cut), (SECOND, cut, elements)):
            if start < stop:
                pieces.append(PieceRecord(file=file, dim=dim, ranges=ranges, start=start, stop=stop))
    return TensorRecord(shape=tuple(shape), pieces=tuple(draw(st.permutations(pieces))))


@quick
@given(data=st.data())
def test_a_manifest_survives_being_written(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = make_checkpoint(Path(name), 1)
        manifest = data.draw(manifests(folder))
        folder = folder.rename(Path(name) / "copy")
        write_manifest(manifest, folder)
        assert read_manifest(folder) == manifest


def test_losses_that_are_not_finite_survive(tmp_path: Path) -> None:
    folder = make_checkpoint(
        tmp_path, 1, loss=float("nan"), eval_loss=float("inf"), monitors={"x": {"losses": [float("-inf")]}}
    )
    manifest = read_manifest(folder)
    assert manifest.loss != manifest.loss
    assert manifest.eval_loss == float("inf")
    assert manifest.monitors == {"x": {"losses": [float("-inf")]}}


def test_the_counts_of_a_run_come_back(tmp_path: Path) -> None:
    state = TrainingState(step=3, consumed_samples=24, applied_samples=16, consumed_tokens=240, skipped_steps=1)
    folder = make_checkpoint(tmp_path, 3, state=StateRecord.of(state))
    assert read_manifest(folder).state.to_training_state() == state


def test_the_world_size_is_the_product_of_the_layout() -> None:
    assert LayoutRecord(num_stages=2, data_parallel_size=3, tensor_parallel_size=4).world_size == 24


@pytest.mark.parametrize(
    "memory",
    [
        pytest.param({"window": (1, 2)}, id="a tuple would come back as a list"),
        pytest.param({1: "x"}, id="a number as key would come back as text"),
        pytest.param([1], id="no object"),
    ],
)
def test_a_memory_that_would_not_come_back_as_it_was_is_refused(tmp_path: Path, memory: Any) -> None:
    folder = make_checkpoint(tmp_path, 1)
    with pytest.raises(ValidationError, match="monitors"):
        manifest_of(1, folder, monitors={"toy": memory})


def test_a_memory_that_could_not_be_read_is_refused_when_it_is_written(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, 1)
    deep: Any = 1
    for _ in range(40):
        deep = [deep]
    for memory in (deep, "\ud800"):
        before = (folder / MANIFEST_NAME).read_bytes()
        with pytest.raises(UserError, match=r"nested|surrogate"):
            write_manifest(manifest_of(1, folder, monitors={"toy": {"memory": memory}}), folder)
        assert (folder / MANIFEST_NAME).read_bytes() == before


def test_a_person_finds_a_key_on_a_line_of_its_own(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, 10)
    lines = (folder / MANIFEST_NAME).read_text().splitlines()
    assert '"loss": 5.25,' in lines
    assert len(lines) == len(json.loads("\n".join(lines))) + 2


@pytest.mark.parametrize("name", ["best", "step_7", "step_0000000a"])
def test_a_checkpoint_may_be_copied_to_a_folder_of_another_name(tmp_path: Path, name: str) -> None:
    folder = make_checkpoint(tmp_path, 10).rename(tmp_path / name)
    assert read_manifest(folder).state.step == 10


@pytest.mark.parametrize("name", ["step_00000011", "step_00000011.partial", "step_00000011.damaged", "step_000000010"])
def test_the_step_is_that_of_the_folder(tmp_path: Path, name: str) -> None:
    folder = make_checkpoint(tmp_path, 10).rename(tmp_path / name)
    if name == "step_000000010":
        read_manifest(folder)
        return
    with pytest.raises(UserError, match=r"of another one: state.step = 10: must be 11"):
        read_manifest(folder)
