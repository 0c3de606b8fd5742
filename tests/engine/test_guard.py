"""The guard in whole runs: a batch of garbage is told, skipped, gone back from or stopped at, to the bit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megastable.checkpoints.folder import step_folders
from megastable.checkpoints.manifest import read_manifest
from megastable.training import loop
from megastable.training.recovery import moved_alone
from tests.support.launches import metrics, train_command, untimed, write_run_file
from tests.support.scripts import FinishedScript, run_script

NUM_STEPS = 50
BATCH = 8
GARBAGE_AT = 30 * BATCH
"""The position of the first sample of step 31."""
SNAPSHOT_INTERVAL = 5


def feed_garbage(begin: int, after: int) -> None:
    """Replace the tokens of a step that begins at one of these positions by random ones."""
    original = vars(loop)["training_micro_batches"]

    def with_garbage(dataset: Any, order: Any, batch: Any, position: int, *rest: Any) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(position)
        for ids, (labels, denominator) in original(dataset, order, batch, position, *rest):
            if begin <= position < after:
                labels = torch.randint(0, 256, labels.shape, generator=generator)
            yield ids, (labels, denominator)

    setattr(loop, "training_micro_batches", with_garbage)  # noqa: B010  # loop does not export it


def run_file(folder: Path, guard: str, **changes: Any) -> Path:
    return write_run_file(
        folder,
        megastable__training={"total_steps": NUM_STEPS, "seed": 7},
        megastable__stability={"guard": guard, "window_steps": 16, "snapshot_interval": SNAPSHOT_INTERVAL},
        megastable__batch_rampup={"final": BATCH},
        megastable__model__dropout=0.1,
        **changes,
    )


def run(
    file: Path,
    run_dir: Path,
    *flags: str,
    world_size: int = 1,
    begin: int = GARBAGE_AT,
    after: int = GARBAGE_AT + BATCH,
) -> FinishedScript:
    """Train on garbage at the positions between."""
    words = train_command([], file, run_dir, *flags)
    return run_script(words, world_size, first=feed_garbage, begin=begin, after=after)


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == kind]


ONE_STAGE: dict[str, Any] = {"megastable__pipeline": {"num_stages": 1}}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "1 stage in fp32": (1, ONE_STAGE),
    "2 stages x 2 replicas in bf16": (4, {"bf16": {"enabled": True}}),
    "2 stages x 2 replicas in fp16": (
        4, {"fp16": {"enabled": True, "initial_scale_power": 8}, "megastable__training__fp16_on_cpu": True},
    ),
    "tensor 2 in fp32": (2, {**ONE_STAGE, "megastable__tensor_parallel": {"size": 2}}),
}  # fmt: skip


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("1 stage in fp32"),
        pytest.param("2 stages x 2 replicas in bf16", marks=pytest.mark.slow),
        pytest.param("2 stages x 2 replicas in fp16", marks=pytest.mark.slow),
        pytest.param("tensor 2 in fp32", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_went_back_is_to_the_bit_the_one_that_left_the_samples_out(tmp_path: Path, layout: str) -> None:
    world_size, changes = LAYOUTS[layout]
    file = run_file(tmp_path, "rollback", **changes)
    flags = ["--set", "megastable.checkpoint.save_interval=10"]
    went_back = run(file, tmp_path / "run", *flags, world_size=world_size)
    assert went_back.exit_codes == [0] * world_size, went_back.output
    (event,) = events(tmp_path / "run", "rollback")
    rollback = event["data"]
    assert rollback["from_step"] == 31 and rollback["next_sample"] == GARBAGE_AT + BATCH
    assert rollback["to_step"] % SNAPSHOT_INTERVAL == 0 and 31 - rollback["to_step"] <= SNAPSHOT_INTERVAL + 11
    assert rollback["first_sample"] == rollback["to_step"] * BATCH
    assert "the loss" in event["text"] and event["text"] in went_back.outputs[0]

    left_out = [[rollback["first_sample"], rollback["next_sample"]]]
    never = run(file, tmp_path / "never", *flags, "--set", f"megastable.training.skip_samples={json.dumps(left_out)}",
                world_size=world_size)  # fmt: skip
    assert never.exit_codes == [0] * world_size, never.output
    assert untimed(metrics(tmp_path / "run")) == untimed(metrics(tmp_path / "never"))
    assert [row["step"] for row in metrics(tmp_path / "run")] == list(range(1, NUM_STEPS + 1))
    assert not events(tmp_path / "run", "files_lost")
    # The checkpoints of the steps that were gone back from are gone, and those of later steps know what was left out.
    newest = read_manifest(step_folders(tmp_path / "run" / "checkpoints")[0])
    assert [record.model_dump() for record in newest.state.rollbacks] == [rollback]
    assert newest.state.left_out_samples == rollback["next_sample"] - rollback["first_sample"]


def test_a_skipped_step_leaves_no_trace_but_its_samples(tmp_path: Path) -> None:
    file = run_file(tmp_path, "skip", **ONE_STAGE)
    finished = run(file, tmp_path / "run")
    assert finished.exit_codes == [0], finished.output
    rows = metrics(tmp_path / "run")
    assert [row["step"] for row in rows if row["vetoed"]] == [31] and rows[30]["skipped"]
    # A veto is no cause of another one: the next loss is an ordinary one.
    assert rows[31]["loss"] < 2 * rows[29]["loss"] < rows[30]["loss"]
    # The learning rate's clock stands still, and the gradient's norm is that of the step that was not applied.
    assert rows[31]["lr"] == rows[30]["lr"]
    told = events(tmp_path / "run", "spike")
    assert {event["step"] for event in told} == {31} and all("not applied" in event["text"] for event in told)
    assert "SKIPPED: it stands out" in finished.output


@pytest.mark.slow
def test_a_warned_step_is_applied_as_if_nobody_watched(tmp_path: Path) -> None:
    rows = {}
    for guard, deviations in (("warn", 8), ("stop", 1e6)):
        file = run_file(tmp_path / guard, guard, **ONE_STAGE)
        flags = ["--set", f"megastable.stability.spike_deviations={deviations}"]
        finished = run(file, tmp_path / guard / "run", *flags)
        assert finished.exit_codes == [0], finished.output
        rows[guard] = untimed(metrics(tmp_path / guard / "run"))
    assert rows["warn"] == rows["stop"]
    assert any("the update is applied" in event["text"] for event in events(tmp_path / "warn" / "run", "spike"))
    assert not events(tmp_path / "stop" / "run", "spike")


def test_a_run_may_stop_instead(tmp_path: Path) -> None:
    file = run_file(tmp_path, "stop", **ONE_STAGE)
    finished = run(file, tmp_path / "run")
    assert finished.exit_codes == [3] and "Traceback" not in finished.output, finished.output
    assert "the run stops at step 31: the loss, " in finished.output
    assert len(metrics(tmp_path / "run")) == 31


def test_a_run_that_goes_back_too_often_stops_and_tells_all(tmp_path: Path) -> None:
    file = run_file(tmp_path, "rollback", **ONE_STAGE)
    flags = ["--set", "megastable.stability.max_rollbacks=2"]
    finished = run(file, tmp_path / "run", *flags, after=10**9)
    assert finished.exit_codes == [3] and "Traceback" not in finished.output, finished.output
    assert "it went back 2 times within 1000 steps (from step 31 to 20, from step 21 to 20)" in finished.output
    assert len(events(tmp_path / "run", "rollback")) == 2


def test_without_a_copy_in_memory_the_newest_whole_checkpoint_is_gone_back_to(tmp_path: Path) -> None:
    """Shortly after a start no state has proved good yet."""
    file = run_file(tmp_path, "rollback", **ONE_STAGE)
    saves = ["--set", "megastable.checkpoint.save_interval=4"]
    ended = run(file, tmp_path / "run", *saves, "--set", "megastable.training.total_steps=28")
    assert ended.exit_codes == [0], ended.output
    resumed = run(file, tmp_path / "run", *saves, "--resume")
    assert resumed.exit_codes == [0], resumed.output
    (event,) = events(tmp_path / "run", "rollback")
    assert event["data"] == {"from_step": 31, "to_step": 28, "first_sample": 28 * BATCH, "next_sample": 31 * BATCH}
    assert "to step 28, from its checkpoint" in event["text"]
    assert [row["step"] for row in metrics(tmp_path / "run")] == list(range(1, NUM_STEPS + 1))
    assert metrics(tmp_path / "run")[28]["data_position"] == 32 * BATCH
    assert any("snapshot_seconds" in row for row in metrics(tmp_path / "run")[:SNAPSHOT_INTERVAL])


def feed_garbage_and_stop(begin: int, after: int, switch: str) -> None:
    """Feed garbage, and ask for a stop once it is read."""
    feed_garbage(begin, after)
    with_garbage = vars(loop)["training_micro_batches"]

    def stopping(dataset: Any, order: Any, batch: Any, position: int, *rest: Any) -> Iterator[Any]:
        if position >= begin + 2 * BATCH:
            Path(switch).touch()
        return with_garbage(dataset, order, batch, position, *rest)

    setattr(loop, "training_micro_batches", stopping)  # noqa: B010  # loop does not export it


def test_a_stop_in_a_row_of_skips_says_what_a_resume_takes_and_a_finished_run_is_finished(tmp_path: Path) -> None:
    file = run_file(tmp_path, "skip", **ONE_STAGE)
    run_dir = tmp_path / "run"
    words = train_command([], file, run_dir, "--set", "megastable.checkpoint.save_interval=10")
    stopped = run_script(
        words, first=feed_garbage_and_stop, begin=GARBAGE_AT, after=10**9, switch=str(run_dir / "STOP")
    )
    assert stopped.exit_codes == [75] and "was saved in a row of skipped steps" in stopped.output, stopped.output
    resumed = run(file, run_dir, "--resume", begin=(NUM_STEPS - 2) * BATCH, after=10**9)
    assert resumed.exit_codes == [0], resumed.output
    assert metrics(run_dir)[30]["step"] == 31 and not metrics(run_dir)[30]["vetoed"]
    assert [row["step"] for row in metrics(run_dir) if row["vetoed"]] == [NUM_STEPS - 1, NUM_STEPS]
    # It ended in skips, too; but no step is left that could be skipped.
    again = run(file, run_dir, "--resume")
    assert again.exit_codes == [0] and len(metrics(run_dir)) == NUM_STEPS, again.output
    assert "older checkpoint" not in again.output


@pytest.mark.parametrize(
    ("movement", "layer"),
    [
        ({"embedding": 0.02, "block_0": 0.01, "block_1": 0.3, "head": 0.0}, "block_1"),
        ({"embedding": 0.02, "block_0": float("inf"), "block_1": 0.03, "head": 0.0}, "block_0"),
        ({"embedding": 0.02, "block_0": 0.01, "block_1": 0.03, "head": 0.0}, None),
        ({"embedding": 0.0, "block_0": 0.0, "block_1": 0.0, "head": 0.0}, None),
        ({}, None),
    ],
)
def test_a_layer_that_has_moved_alone_is_named(movement: dict[str, float], layer: str | None) -> None:
    text = moved_alone(movement)
    assert text is None if layer is None else text is not None and text.startswith(f"the weights of {layer} have")
