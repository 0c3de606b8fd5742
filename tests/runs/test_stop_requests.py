"""Runs that are asked to stop: they save on all ranks, end with a code of their own, and continue exactly.

The ranks are forked and signal themselves, so that a signal comes at a known place of the run.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed

from megastable.checkpoints.folder import folder_name, step_folders
from megastable.engine.checkpoint_writer import CheckpointWriter
from megastable.engine.training_engine import TrainingEngine
from megastable.training import build
from tests.support.launches import assert_holds_no_run, metrics, train_command, write_run_file
from tests.support.scripts import FinishedScript, run_script

NUM_STEPS = 12
SAVED, NOT_SAVED = 75, 76
RUN = {
    "megastable__model__dropout": 0.1,
    "megastable__training": {"total_steps": NUM_STEPS, "seed": 7, "eval_interval": 5, "eval_samples": 6},
}


PLACES = {
    "train_batch": TrainingEngine, "evaluate": TrainingEngine, "save": CheckpointWriter, "prepare_corpus": build,
}  # fmt: skip
"""Function -> where it is looked up."""


def signal_self(number: int) -> None:
    os.kill(os.getpid(), number)


def be_signalled(place: str, call: int, ranks: list[int], number: int) -> None:
    """Let these ranks get a signal at the beginning of a call (the first is 1) of a step, evaluation, save or corpus.

    A rank alone goes on when its thread has taken the signal in.
    """
    if int(os.environ["RANK"]) not in ranks:
        return
    owner: Any = PLACES[place]
    original = getattr(owner, place)
    calls = []

    def signalled(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == call:
            signal_self(number)
            time.sleep(0.3)
        return original(*arguments, **options)

    setattr(owner, place, signalled)


def run(run_file: Path, run_dir: Path, *flags: str, **arguments: Any) -> FinishedScript:
    first = be_signalled if arguments else None
    return run_script(train_command([], run_file, run_dir, *flags), world_size=2, first=first, **arguments)


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    return [event for event in lines if event["kind"] == kind]


def losses(run_dir: Path) -> list[tuple[int, float, float]]:
    return [(row["step"], row["loss"], row["grad_norm"]) for row in metrics(run_dir)]


class Whole(NamedTuple):
    """Is a run that nobody has stopped."""

    run_file: Path
    run_dir: Path
    seconds: float


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    folder = tmp_path_factory.mktemp("whole")
    run_file = write_run_file(folder, **RUN)
    run(run_file, folder / "first")  # which fills the cache, and starts the server from which ranks are forked
    started = time.monotonic()
    finished = run(run_file, folder / "run")
    assert finished.exit_codes == [0, 0], finished.output
    return Whole(run_file, folder / "run", time.monotonic() - started)


@pytest.mark.parametrize(
    ("number", "ranks", "place", "call", "step"),
    [
        pytest.param(signal.SIGTERM, [1], "train_batch", 4, 4, id="SIGTERM to one rank"),
        pytest.param(signal.SIGUSR1, [0, 1], "train_batch", 4, 4, id="SIGUSR1 to all ranks", marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, [0], "train_batch", 1, 1, id="Ctrl-C in the first step", marks=pytest.mark.slow),
        pytest.param(
            signal.SIGHUP, [1], "evaluate", 1, 5, id="a closed terminal in an evaluation", marks=pytest.mark.slow
        ),
        pytest.param(signal.SIGTERM, [1], "save", 1, 3, id="SIGTERM in a save"),
    ],
)
def test_a_signal_is_followed_by_a_save_and_a_code_and_the_run_continues_exactly(
    whole: Whole, tmp_path: Path, number: int, ranks: list[int], place: str, call: int, step: int
) -> None:
    run_dir = tmp_path / "run"
    flags = ["--set", "megastable.checkpoint.save_interval=3"] if place == "save" else []
    stopped = run(whole.run_file, run_dir, *flags, place=place, call=call, ranks=ranks, number=number)
    assert stopped.exit_codes == [SAVED, SAVED], stopped.output
    assert len(metrics(run_dir)) == step
    newest = step_folders(run_dir / "checkpoints")[-1]
    assert newest.name == folder_name(step)
    reason = f"rank {ranks[0]} got {signal.Signals(number).name}"
    (event,) = events(run_dir, "asked_to_stop")
    assert event["step"] == step and event["data"] == {"reason": reason}
    last_line = f"[megastable] the run stops at step {step}: {reason}; --resume goes on from {newest}"
    assert stopped.output.count(last_line) == 1, stopped.output
    assert "Traceback" not in stopped.output and "is gone" not in stopped.output, stopped.output

    resumed = run(whole.run_file, run_dir, "--resume")
    assert resumed.exit_codes == [0, 0], resumed.output
    assert losses(run_dir) == losses(whole.run_dir)


def be_signalled_and_leave_slowly() -> None:
    """Let rank 1 get a signal in the second step, and need some time more than rank 0 for the end of its process."""
    be_signalled("train_batch", 2, [1], signal.SIGTERM)
    if os.environ["RANK"] == "1":
        destroy = torch.distributed.destroy_process_group

        def destroy_slowly() -> None:
            destroy()
            time.sleep(3)

        setattr(torch.distributed, "destroy_process_group", destroy_slowly)  # noqa: B010  # its type is kept


@pytest.mark.slow
def test_a_rank_that_the_launcher_ends_for_the_end_of_another_has_the_same_code(whole: Whole, tmp_path: Path) -> None:
    """As srun does with --kill-on-bad-exit, which then reports the highest code."""
    words = train_command([], whole.run_file, tmp_path)
    stopped = run_script(words, world_size=2, first=be_signalled_and_leave_slowly)
    assert stopped.exit_codes == [SAVED, SAVED], stopped.output
    assert "is gone" not in stopped.output


def test_a_run_that_saves_nothing_says_so(whole: Whole, tmp_path: Path) -> None:
    flags = ["--set", "megastable.checkpoint.save_interval=null"]
    stopped = run(whole.run_file, tmp_path, *flags, place="train_batch", call=2, ranks=[1], number=signal.SIGTERM)
    assert stopped.exit_codes == [NOT_SAVED, NOT_SAVED], stopped.output
    assert "nothing was saved, since megastable.checkpoint.save_interval is null" in stopped.outputs[0]
    assert not (tmp_path / "checkpoints").exists()


def test_a_signal_in_the_last_step_changes_nothing(whole: Whole, tmp_path: Path) -> None:
    finished = run(whole.run_file, tmp_path, place="train_batch", call=NUM_STEPS, ranks=[0, 1], number=signal.SIGTERM)
    assert finished.exit_codes == [0, 0], finished.output
    assert "eval_loss" in metrics(tmp_path)[-1] and "done:" in finished.output
    assert not events(tmp_path, "asked_to_stop")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_while_the_corpus_is_built_ends_the_process_at_once(whole: Whole, tmp_path: Path, number: int) -> None:
    stopped = run(whole.run_file, tmp_path / "run", place="prepare_corpus", call=1, ranks=[0, 1], number=number)
    # The second rank may see that the first is gone before its own signal.
    assert set(stopped.exit_codes) <= {128 + number, 1} and 128 + number in stopped.exit_codes, stopped.output
    assert "before its first step: nothing to save" in stopped.output
    assert "Traceback" not in stopped.output
    assert_holds_no_run(tmp_path / "run")


def be_signalled_twice_and_hang(pause_seconds: float) -> None:
    """Let rank 0 wait in the third step for rank 1, which hangs, and get two signals meanwhile."""
    train_batch = TrainingEngine.train_batch
    steps = []
    rank = os.environ["RANK"]

    def signal_twice() -> None:
        time.sleep(1)
        signal_self(signal.SIGTERM)
        time.sleep(pause_seconds)
        signal_self(signal.SIGINT)

    def third_hangs(*arguments: Any, **options: Any) -> Any:
        steps.append(1)
        if len(steps) == 3 and rank == "0":
            threading.Thread(target=signal_twice, daemon=True).start()
        if len(steps) == 3 and rank == "1":
            time.sleep(300)
        return train_batch(*arguments, **options)

    TrainingEngine.train_batch = third_hangs  # type: ignore[method-assign]


def test_a_second_signal_ends_a_rank_that_hangs(whole: Whole, tmp_path: Path) -> None:
    started = time.monotonic()
    stopped = run_script(
        train_command([], whole.run_file, tmp_path), world_size=2, first=be_signalled_twice_and_hang, pause_seconds=2
    )
    assert time.monotonic() - started < 100
    assert stopped.exit_codes[0] == 128 + signal.SIGINT, stopped.output
    assert "rank 0 got SIGINT once more and ends at once" in stopped.outputs[0]
    # The launcher's SIGTERM finds the peer gone.
    assert stopped.exit_codes[1] == 1 and "is gone" in stopped.outputs[1], stopped.output


@pytest.mark.slow
def test_a_time_limit_is_kept_with_a_save(whole: Whole, tmp_path: Path) -> None:
    limit_seconds = round(10 + 2 * whole.seconds)
    flags = ["--set", f"megastable.training.time_limit={limit_seconds}"]
    flags += ["--set", "megastable.training.total_steps=100000"]
    started = time.monotonic()
    stopped = run(whole.run_file, tmp_path, *flags)
    seconds = time.monotonic() - started
    assert stopped.exit_codes == [SAVED, SAVED], stopped.output
    assert limit_seconds / 4 < seconds < limit_seconds
    (event,) = events(tmp_path, "asked_to_stop")
    assert f"megastable.training.time_limit = {limit_seconds} s" in event["text"]
    assert [path.name for path in step_folders(tmp_path / "checkpoints")] == [folder_name(event["step"])]


def test_a_time_limit_that_is_over_before_the_first_step_ends_the_process(whole: Whole, tmp_path: Path) -> None:
    stopped = run(whole.run_file, tmp_path / "run", "--set", "megastable.training.time_limit=0.01")
    # The launcher ends a rank that has not begun to listen yet.
    expected = {NOT_SAVED, 1, -signal.SIGTERM}
    assert set(stopped.exit_codes) <= expected and NOT_SAVED in stopped.exit_codes, stopped.output
    assert "time_limit = 0.01 s is over before the first step" in stopped.output
    assert_holds_no_run(tmp_path / "run")


def put_file(path: str, call: int) -> None:
    """Let a file appear in the given call of a step, as somebody puts it there."""
    original = TrainingEngine.train_batch
    calls = []

    def and_put(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == call and os.environ["RANK"] == "0":
            Path(path).touch()
        return original(*arguments, **options)

    TrainingEngine.train_batch = and_put  # type: ignore[method-assign]


def test_a_file_stops_a_run_with_a_save_and_another_one_saves_alone(whole: Whole, tmp_path: Path) -> None:
    words = train_command([], whole.run_file, tmp_path)
    checkpoints = tmp_path / "checkpoints"
    stopped = run_script(words, world_size=2, first=put_file, path=str(tmp_path / "STOP"), call=4)
    assert stopped.exit_codes == [SAVED, SAVED], stopped.output
    assert f"the run stops at step 5: rank 0 found the file {tmp_path / 'STOP'}" in stopped.output
    assert [folder.name for folder in step_folders(checkpoints)] == [folder_name(5)]
    resumed = run_script([*words, "--resume"], world_size=2, first=put_file, path=str(tmp_path / "SAVE"), call=3)
    assert resumed.exit_codes == [0, 0], resumed.output
    assert [folder.name for folder in step_folders(checkpoints)] == [folder_name(step) for step in (NUM_STEPS, 9, 5)]
    assert losses(tmp_path) == losses(whole.run_dir)
    assert not (tmp_path / "STOP").exists() and not (tmp_path / "SAVE").exists()
