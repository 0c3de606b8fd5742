"""What DeepSpeed's writers hold of a run that was ended and goes on, also further back: every step once."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from deepspeed.monitor.config import DeepSpeedMonitorConfig
from deepspeed.monitor.monitor import MonitorMaster
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megastable.engine.writers import rewind_writers
from tests.support.ranks import run_ranks

BATCH = 4
"""Samples of a step."""
EVAL_INTERVAL = 3


def writers_of(folder: Path) -> MonitorMaster:
    """Make DeepSpeed's writers on a folder, as every start of a run does."""
    sections = {name: {"enabled": True, "output_path": str(folder / name)} for name in ("tensorboard", "csv_monitor")}
    return MonitorMaster(DeepSpeedMonitorConfig(**sections))


def take_steps(writers: MonitorMaster, first: int, last: int, attempt: int) -> None:
    """Write the steps from ``first`` to ``last``, evaluated now and then; their values tell the attempt."""
    for step in range(first, last + 1):
        names = ["Train/loss"] if step % EVAL_INTERVAL else ["Train/loss", "Train/eval_loss"]
        writers.write_events([(name, step + attempt / 8, step * BATCH) for name in names])


def csv_rows(folder: Path, name: str) -> list[tuple[int, float]]:
    """Return the rows of a CSV file, which begins with its header."""
    (path,) = (folder / "csv_monitor").rglob(f"{name}.csv")
    header, *rows = path.read_text().splitlines()
    assert header == f"step,{name.removeprefix('Train_')}"
    return [(int(samples), float(value)) for samples, value in (row.split(",") for row in rows)]


def put_in_order(folder: Path, attempt: int) -> None:
    """Name the files of an attempt as if it had come seconds after the one before: TensorBoard reads them by name."""
    (summaries_folder,) = (folder / "tensorboard").iterdir()
    # Within a second, one process numbers its files.
    new = sorted(summaries_folder.glob("events.*.*.*.*"), key=lambda path: int(path.suffix.removeprefix(".")))
    for path in new:
        path.rename(summaries_folder / f"tfevents_{attempt:03}_{new.index(path)}")


def summaries(folder: Path, tag: str) -> list[tuple[int, float]]:
    """Return what TensorBoard shows of a tag."""
    (path,) = (folder / "tensorboard").iterdir()
    events = EventAccumulator(str(path))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def every_step_once_after_any_starts() -> None:
    """Go back by any number of steps, any number of times."""

    @settings(max_examples=15, deadline=None)
    @given(st.lists(st.tuples(st.integers(0, 7), st.integers(EVAL_INTERVAL, 7)), min_size=1, max_size=4))
    def check(starts: list[tuple[int, int]]) -> None:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            expected: dict[int, float] = {}
            for attempt, (steps_back, num_steps) in enumerate(starts):
                reached = max(0, len(expected) - steps_back)
                writers = writers_of(folder)
                if attempt:
                    rewind_writers(writers, reached * BATCH)
                take_steps(writers, reached + 1, reached + num_steps, attempt)
                writers.tb_monitor.summary_writer.close()
                put_in_order(folder, attempt)
                expected = {step: value for step, value in expected.items() if step <= reached}
                expected |= {step: step + attempt / 8 for step in range(reached + 1, reached + num_steps + 1)}
            steps = [(step * BATCH, value) for step, value in expected.items()]
            evaluated = [(step * BATCH, value) for step, value in expected.items() if step % EVAL_INTERVAL == 0]
            assert csv_rows(folder, "Train_loss") == steps
            assert csv_rows(folder, "Train_eval_loss") == evaluated
            assert summaries(folder, "Train/loss") == steps
            assert summaries(folder, "Train/eval_loss") == evaluated

    check()


def test_every_step_stands_once_after_any_starts() -> None:
    run_ranks(every_step_once_after_any_starts, world_size=1)


def csv_files_after_a_damage(folder: str, written: str) -> dict[str, str]:
    """Let the CSV writer go on at sample 8 with one more step where its file holds ``written``; returns all files."""
    path = Path(folder) / "csv_monitor" / "DeepSpeedJobName" / "Train_loss.csv"
    path.parent.mkdir(parents=True)
    path.write_bytes(written.encode("latin-1"))
    writers = writers_of(Path(folder))
    rewind_writers(writers, 8)
    take_steps(writers, 3, 3, attempt=0)
    return {file.name: file.read_bytes().decode("latin-1") for file in path.parent.iterdir() if "eval" not in file.name}


def all_damages(folder: str) -> list[Any]:
    """Try every damage."""
    return [csv_files_after_a_damage(f"{folder}/{number}", written) for number, written in enumerate(DAMAGED)]


WHOLE = "step,loss\r\n4,1.0\r\n8,2.0\r\n"
LATER = "12,9.0\r\n16,9.0\r\n"
WITH_STEP_3 = WHOLE + "12,3.0\r\n"
DAMAGED: dict[str, dict[str, str]] = {
    WHOLE: {"Train_loss.csv": WITH_STEP_3},
    WHOLE + "12,9.0\r\n16,9.0\r\n": {
        "Train_loss.csv": WITH_STEP_3,
        "Train_loss.superseded.csv": "12,9.0\r\n16,9.0\r\n",
    },
    WHOLE + "12,9.": {"Train_loss.csv": WITH_STEP_3, "Train_loss.superseded.csv": "12,9.\r\n"},
    WHOLE + "8": {"Train_loss.csv": WITH_STEP_3, "Train_loss.superseded.csv": "8\r\n"},
    # A header in the middle is of an older start, and a row that ran into one cannot be read.
    WHOLE[:-7] + "step,loss\r\n8,2.0\r\n": {"Train_loss.csv": WITH_STEP_3, "Train_loss.superseded.csv": ""},
    WHOLE + "8,1.step,loss\r\n": {"Train_loss.csv": WITH_STEP_3, "Train_loss.superseded.csv": "8,1.step,loss\r\n"},
    WHOLE + "\xff,\0\r\n": {"Train_loss.csv": WITH_STEP_3, "Train_loss.superseded.csv": "\xff,\0\r\n"},
    "step,lo": {"Train_loss.csv": "step,loss\r\n12,3.0\r\n"},
    "": {"Train_loss.csv": "step,loss\r\n12,3.0\r\n"},
}
"""What stands in the file -> the files after the next step."""


def test_rows_that_are_taken_back_or_cannot_be_read_are_kept_aside(tmp_path: Path) -> None:
    (found,) = run_ranks(all_damages, world_size=1, folder=str(tmp_path))
    assert found == list(DAMAGED.values())
