"""Saves in the background, on real ranks: they disturb nothing, hold their own step, lose nothing when they fail."""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed
import torch.distributed as dist

from megastable.checkpoints.folder import folder_name, step_folders, step_of
from megastable.checkpoints.manifest import FileRecord
from megastable.checkpoints.verify import verify
from megastable.config.training import CheckpointConfig
from megastable.core.records import TrainingState
from megastable.engine import checkpoint_writer
from megastable.engine.checkpoint import RunRecord
from megastable.engine.checkpoint_tensors import file_name
from megastable.engine.checkpoint_writer import ATTEMPTS, CheckpointWriter, SaveOutcome
from megastable.engine.model_state import Snapshot
from megastable.engine.training_engine import TrainingEngine
from tests.support.ranks import run_ranks
from tests.support.steps import build_engine, load, train
from tests.support.tiny_run import tiny_run

LAYOUTS: dict[str, dict[str, Any]] = {"2 stages": {"megastable__pipeline__num_stages": 2}, "2 replicas": {}}
SLOW_SECONDS = 0.3
FREE_BYTES = 1000


def _engine(layout: str) -> tuple[Any, TrainingEngine]:
    return build_engine(tiny_run(megastable__model__dropout=0.1, **LAYOUTS[layout]))


def _writer(engine: TrainingEngine, folder: Path, keep_last: int | None = None) -> CheckpointWriter:
    return CheckpointWriter(folder, engine.model_state, engine.layout, CheckpointConfig(keep_last=keep_last))


def _record(step: int) -> RunRecord:
    state = TrainingState(step=step, consumed_samples=4 * step, applied_samples=4 * step)
    return RunRecord(state, {}, "corpus", {}, loss=None, eval_loss=None)


def _saved(writer: CheckpointWriter, step: int) -> SaveOutcome:
    """Save, and wait for the end."""
    writer.save(_record(step))
    writer.wait()
    (outcome,) = writer.outcomes()
    return outcome


def _steps_in(folder: Path) -> list[int]:
    return sorted(step_of(path) for path in step_folders(folder))


def _files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@contextlib.contextmanager
def _before(name: str, act: Callable[..., Any]) -> Iterator[None]:
    """Let ``act`` run, with the same arguments, before each call of what the writer calls ``name``."""
    original = getattr(checkpoint_writer, name)

    def both(*arguments: Any) -> Any:
        act(*arguments)
        return original(*arguments)

    with patch.object(checkpoint_writer, name, both):
        yield


# What a save leaves alone, and what it holds


def steps_beside_a_save(layout: str, folder: str) -> dict[str, Any]:
    """Take the same steps without a save, while its file waits to be written, and while it is written."""
    plan, engine = _engine(layout)
    state, _ = train(plan, engine, 2)
    at_save = engine.snapshot()

    def steps(num_steps: int, start: TrainingState) -> tuple[TrainingState, list[list[float]]]:
        reached, rows = train(plan, engine, num_steps, start)
        return reached, [[row["loss"], row["grad_norm"]] for row in rows]

    _, undisturbed = steps(6, state)
    engine.restore(at_save)
    writer = _writer(engine, Path(folder))
    goes_on = threading.Event()
    if torch.distributed.get_rank() == 1:
        goes_on.set()  # it has written at once and waits for rank 0 to do so, while both train
    with _before("write_pieces", lambda *_: goes_on.wait()):
        writer.save(_record(state.step))
        reached, first = steps(3, state)
        unfinished = not writer.outcomes()
        goes_on.set()
        _, last = steps(3, reached)
        writer.wait()
    (outcome,) = writer.outcomes()
    _, engine = _engine(layout)
    load(engine, outcome.folder)
    return {
        "undisturbed": undisturbed, "disturbed": first + last, "unfinished": unfinished, "fault": outcome.fault,
        "different": _differences(engine.snapshot(), at_save), "damage": verify(outcome.folder),
    }  # fmt: skip


def _differences(a: Snapshot, b: Snapshot) -> list[str]:
    """List what is not equal to the bit."""
    different = [
        f"{kind} of group {index}"
        for index, (of_a, of_b) in enumerate(zip(a.flats, b.flats, strict=True))
        for kind in of_a
        if not torch.equal(of_a[kind], of_b[kind])
    ]
    different += [name for name, generator in a.random.items() if not torch.equal(generator, b.random[name])]
    return different + ["optimizer_steps"] * (a.optimizer_steps != b.optimizer_steps)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_steps_beside_a_save_are_the_same_to_the_bit_and_are_not_in_it(layout: str, tmp_path: Path) -> None:
    for result in run_ranks(steps_beside_a_save, world_size=2, layout=layout, folder=str(tmp_path)):
        assert result["unfinished"], "the steps were not beside the save"
        assert result["fault"] is None and result["damage"] == []
        assert result["disturbed"] == result["undisturbed"]
        assert result["different"] == []


# All else, in one launch


def all_else(folder: str) -> dict[str, Any]:
    """Let saves follow one another, fail in every way, and thin out, each in a folder of its own."""
    _, engine = _engine("2 stages")
    with patch.object(checkpoint_writer, "RETRY_SECONDS", 0.05):
        return {case.__name__: case(engine, Path(folder) / case.__name__) for case in CASES}


def second_save(engine: TrainingEngine, folder: Path) -> dict[str, Any]:
    """Begin to save a second state while the save of the first is slow; look when that returns, and at the end."""
    writer = _writer(engine, folder)
    states = []
    whole = []
    with _before("write_pieces", lambda *_: time.sleep(SLOW_SECONDS)):
        for step in (1, 2):
            _fill(engine, float(step))
            states.append(engine.snapshot())
            writer.save(_record(step))
            whole.append(_steps_in(folder))
        writer.wait()
    whole.append(_steps_in(folder))
    different = []
    for step, state in enumerate(states, start=1):
        load(engine, folder / folder_name(step))
        different += _differences(engine.snapshot(), state)
    return {"whole": whole, "ended": [outcome.step for outcome in writer.outcomes()], "different": different}


def _fill(engine: TrainingEngine, value: float) -> None:
    for held, flats in zip(engine.model_state.partitions, engine.model_state.flats(), strict=True):
        for flat in flats.values():
            flat.zero_()
            for parameter in held.held:
                flat[slice(*parameter.piece_span)] = value
    engine.model_state.set_counts(int(value), None)


def failed_write(engine: TrainingEngine, folder: Path) -> dict[str, Any]:
    """Put a folder where rank 1 writes its file: at every attempt, at the first one of another save, then never."""
    writer = _writer(engine, folder)
    attempts: list[Path] = []

    def obstruct(num_attempts: int, partial: Path, rank: int, *_: Any) -> None:
        attempts.append(partial)
        if rank == 1 and len(attempts) <= num_attempts:
            (partial / file_name(rank)).mkdir()

    with _before("write_pieces", lambda *arguments: obstruct(ATTEMPTS, *arguments)):
        failed = _saved(writer, 1)
    left = [path.name for path in folder.iterdir()]
    dist.barrier()  # before the next save, which rank 0 begins
    tried = len(attempts)
    attempts.clear()
    with _before("write_pieces", lambda *arguments: obstruct(1, *arguments)):
        retried = _saved(writer, 2)
    later = _saved(writer, 3)
    return {
        "fault": failed.fault, "attempts": tried, "left": left,
        "later": [retried.fault, *verify(retried.folder), later.fault, *verify(later.folder)],
        "steps": _steps_in(folder),
    }  # fmt: skip


def thinned(engine: TrainingEngine, folder: Path) -> dict[str, Any]:
    """Keep one checkpoint; look what is there when the second one is read back."""
    writer = _writer(engine, folder, keep_last=1)
    _saved(writer, 1)
    seen: list[list[int]] = []
    with _before("faults_of_file", lambda *_: seen.append(_steps_in(folder))):
        outcome = _saved(writer, 2)
    return {"at the reading back": seen, "after it": _steps_in(folder), "fault": outcome.fault}


def damaged_by_the_disk(engine: TrainingEngine, folder: Path) -> dict[str, Any]:
    """Keep one checkpoint; flip a bit of rank 1's file before the second one is read back."""
    writer = _writer(engine, folder, keep_last=1)
    _saved(writer, 1)

    def flip(checkpoint: Path, name: str, _: FileRecord) -> None:
        if name == file_name(1):
            content = bytearray((checkpoint / name).read_bytes())
            content[-1] ^= 1
            (checkpoint / name).write_bytes(content)

    with _before("faults_of_file", flip):
        outcome = _saved(writer, 2)
    return {"fault": outcome.fault, "steps": _steps_in(folder), "damage of the first": verify(folder / folder_name(1))}


def full_disk(engine: TrainingEngine, folder: Path) -> dict[str, Any]:
    """Save where little is free: for the first time, when there is no folder of checkpoints yet, and again."""
    disk_usage = shutil.disk_usage
    writer = _writer(engine, folder)
    faults = []
    files: list[str] = []
    little_free = patch.object(shutil, "disk_usage", lambda path: disk_usage(path)._replace(free=FREE_BYTES))
    with little_free, _before("write_pieces", lambda *_: files.append("written")):
        for step in (1, 2):
            faults.append(_saved(writer, step).fault)
            files += _files_in(folder)
    return {"faults": faults, "files": files, "later": _saved(writer, 3).fault}


def taken_over(engine: TrainingEngine, folder: Path) -> dict[str, Any]:
    """Let another run take the folder over before a save, and while rank 0 writes its file; thinning is on."""
    taken = [False]
    config = CheckpointConfig(keep_last=1)
    writer = CheckpointWriter(
        folder, engine.model_state, engine.layout, config, lambda: "taken over" if taken[0] else None
    )
    _saved(writer, 1)
    with _before("write_pieces", lambda *_: taken.__setitem__(0, True)):
        faults = [_saved(writer, 2).fault]
    # The other run is in the same save, and its files are not to be touched.
    left = _files_in(folder)
    faults.append(_saved(writer, 3).fault)
    return {"faults": faults, "steps": _steps_in(folder), "touched": left != _files_in(folder)}


CASES = (second_save, failed_write, thinned, damaged_by_the_disk, full_disk, taken_over)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(all_else, world_size=2, folder=str(tmp_path_factory.mktemp("saves")))


def test_a_save_waits_for_the_one_under_way_and_the_end_for_the_last(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        found = rank["second_save"]
        assert found["whole"] == [[], [1], [1, 2]]
        assert found["ended"] == [1, 2]
        assert found["different"] == []


def test_a_write_error_of_one_rank_is_tried_again_and_then_told_on_all(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        found = rank["failed_write"]
        assert found["fault"] == ranks[0]["failed_write"]["fault"]
        assert "stage 1" in found["fault"] and file_name(1) in found["fault"], found["fault"]
        assert found["attempts"] == ATTEMPTS
        assert found["left"] == []
        assert found["later"] == [None, None]
        assert found["steps"] == [2, 3]


def test_an_old_checkpoint_goes_when_a_newer_one_was_read_back(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["thinned"] == {"at the reading back": [[1, 2]], "after it": [2], "fault": None}


def test_nothing_is_deleted_for_a_checkpoint_that_reads_back_differently(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        found = rank["damaged_by_the_disk"]
        assert "cannot be read back" in found["fault"] and file_name(1) in found["fault"]
        assert found["steps"] == [1, 2]
        assert found["damage of the first"] == []


def test_what_does_not_fit_is_not_begun(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        found = rank["full_disk"]
        assert all(f"{FREE_BYTES:,} bytes free" in fault for fault in found["faults"]), found["faults"]
        assert found["files"] == []
        assert found["later"] is None


def test_a_folder_of_another_run_is_not_written(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        found = rank["taken_over"]
        assert found == {"faults": ["taken over", "taken over"], "steps": [1], "touched": False}
