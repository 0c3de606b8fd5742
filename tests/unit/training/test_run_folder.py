"""A run's folder: nothing is written over, no line of metrics is lost, and where a run starts from."""

import json
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.config import load_run_file, run_from_dict
from megastable.config.run_config import run_as_dict
from megastable.core.errors import UserError
from megastable.core.records import TrainingState
from megastable.training import run_folder
from megastable.training.run_folder import RunFolder, checkpoint_to_load, checkpoint_to_resume
from tests.support.checkpoints import write_checkpoint
from tests.support.tiny_run import tiny_run

quick = settings(max_examples=25, deadline=None)  # no deadline: the machine may be busy
RUN_FILES = Path(__file__).parents[3] / "ds_configs"
SHIPPED = sorted(path for path in RUN_FILES.glob("*.json") if not path.name.endswith(".schema.json"))


def saved_at(step: int, checkpoints: Path) -> Path:
    """Write a complete checkpoint without weights."""
    return write_checkpoint(checkpoints / f"step_{step:08d}", tiny_run(), TrainingState(step))


# Nothing is written over


def test_a_fresh_folder_is_unused(tmp_path: Path) -> None:
    RunFolder(tmp_path / "new").check_unused()
    RunFolder(tmp_path).check_unused()


def test_a_folder_whose_run_never_took_a_step_is_unused(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.write_config(tiny_run())
    (folder.checkpoints / "step_00000010.partial").mkdir(parents=True)
    folder.check_unused()


def test_a_run_that_ended_before_its_first_step_left_nothing_to_protect(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.metrics.write_text("")
    folder.check_unused()


@pytest.mark.parametrize("left", ["metrics", "checkpoint"])
def test_a_folder_that_holds_a_run_is_refused(tmp_path: Path, left: str) -> None:
    folder = RunFolder(tmp_path)
    if left == "metrics":
        folder.metrics.write_text('{"step": 1}\n')
    else:
        (folder.checkpoints / "step_00000010").mkdir(parents=True)
    advice = "--resume=auto, remove the folder.*--run-dir" if left == "metrics" else "--resume.*--run-dir"
    with pytest.raises(UserError, match=advice) as caught:
        folder.check_unused()
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_the_written_config_is_the_run(tmp_path: Path, path: Path) -> None:
    run = load_run_file(path, ["megastable.training.seed=7"])
    folder = RunFolder(tmp_path / "a" / "b")
    folder.write_config(run)
    assert load_run_file(folder.config) == run
    assert run_from_dict(run_as_dict(run)) == run
    assert [file.name for file in folder.path.iterdir()] == ["config.json"]


# Metrics of a resumed run


def line(step: int, note: str = "") -> str:
    """Make a line of metrics."""
    return json.dumps({"step": step, "loss": 1.5, "note": note}) + "\n"


def superseded(folder: RunFolder) -> str:
    """Return the lines that were moved away."""
    path = folder.path / "metrics.superseded.jsonl"
    return path.read_text() if path.exists() else ""


def test_lines_after_the_checkpoint_are_moved_away(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.metrics.write_text("".join(map(line, range(1, 8))))
    folder.drop_lines_after(5)
    assert folder.metrics.read_text() == "".join(map(line, range(1, 6)))
    assert superseded(folder) == line(6) + line(7)


def test_events_are_cut_with_the_metrics(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.events.write_text(line(3) + line(6))
    folder.drop_lines_after(5)
    assert folder.events.read_text() == line(3)
    assert (tmp_path / "events.superseded.jsonl").read_text() == line(6)


def test_nothing_to_drop(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.drop_lines_after(5)
    assert not folder.metrics.exists()
    folder.metrics.write_text(line(1) + line(5))
    folder.drop_lines_after(5)
    assert folder.metrics.read_text() == line(1) + line(5)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


@quick
@given(num_steps=st.integers(0, 6), cut=st.integers(0, 60), step=st.integers(0, 7))
def test_no_line_is_lost_wherever_a_kill_cut_the_last_one(num_steps: int, cut: int, step: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = RunFolder(Path(name))
        written = "".join(map(line, range(1, num_steps + 1))) + line(num_steps + 1)[:cut]
        folder.metrics.write_text(written)
        folder.drop_lines_after(step)
        kept = folder.metrics.read_text()
        assert kept + superseded(folder) in (written, f"{written}\n")  # a cut line gets an end of its own
        kept_steps = [json.loads(text)["step"] for text in kept.splitlines()]
        complete = num_steps + (cut >= len(line(num_steps + 1)) - 1)  # the newline alone may be missing
        assert kept_steps == list(range(1, min(complete, step) + 1))


@quick
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 5)), max_size=5))
def test_every_step_is_there_once_after_any_number_of_resumes(attempts: list[tuple[int, int]]) -> None:
    """Each attempt resumes from a step that exists and takes some more steps."""
    with tempfile.TemporaryDirectory() as name:
        folder = RunFolder(Path(name))
        reached, total_lines = 0, 0
        for attempt, (steps, steps_back) in enumerate(attempts):
            start = max(0, reached - steps_back)
            folder.drop_lines_after(start)
            reached = start + steps
            with open(folder.metrics, "a") as file:
                file.writelines(line(step, f"attempt {attempt}") for step in range(start + 1, reached + 1))
            total_lines += steps
        if not attempts:
            return
        rows = [json.loads(text) for text in folder.metrics.read_text().splitlines()]
        assert [row["step"] for row in rows] == list(range(1, reached + 1))
        assert len(rows) + len(superseded(folder).splitlines()) == total_lines


def test_a_cut_line_does_not_swallow_the_next_superseded_one(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.metrics.write_text(line(1) + line(2)[:9])
    folder.drop_lines_after(1)
    with open(folder.metrics, "a") as file:
        file.write(line(2) + line(3))
    folder.drop_lines_after(1)
    assert superseded(folder).splitlines(keepends=True)[-2:] == [line(2), line(3)]


def test_a_line_that_misses_only_its_end_does_not_swallow_the_next(tmp_path: Path) -> None:
    """Metrics are not fsynced and checkpoints are, so a power cut can leave this."""
    folder = RunFolder(tmp_path)
    folder.metrics.write_text(line(1) + line(2).rstrip("\n"))
    folder.drop_lines_after(2)
    with open(folder.metrics, "a") as file:
        file.write(line(3))
    assert [json.loads(text)["step"] for text in folder.metrics.read_text().splitlines()] == [1, 2, 3]


# Lines and files that cannot be read

UNREADABLE = {
    "a number": b"7",
    "null": b"null",
    "a list": b"[1, 2]",
    "no UTF-8": b'{"step": 1, "note": "\xff\xfe"}',
    "zeros": b"\0" * 40,
    "no step": b'{"loss": 1.5}',
    "a step that is text": b'{"step": "1"}',
    "a step that is true": b'{"step": true}',
    "a step between steps": b'{"step": 1.5}',
    "a step that is no number": b'{"step": NaN}',
    "a number without end": b'{"step": 1' + b"0" * 5000 + b"}",
    "nested too deep": b"[" * 100_000,
    "a line separator of Unicode": '{"step": \u2028'.encode(),
    "a huge line": b'{"step": 1, "note": "' + b"x" * 2000 + b'"}',
}


@pytest.mark.parametrize("name", UNREADABLE)
@pytest.mark.parametrize("place", ["first", "between", "last", "last, cut short"])
def test_a_line_that_cannot_be_read_is_set_aside_with_one_message(
    tmp_path: Path, name: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folder, "LONGEST_LINE_BYTES", 1000)
    bad = UNREADABLE[name] + b"\n"
    good = [line(step).encode() for step in (1, 2, 3)]
    index = {"first": 0, "between": 1}.get(place, 3)
    written = b"".join([*good[:index], bad, *good[index:]])
    folder = RunFolder(tmp_path)
    folder.metrics.write_bytes(written[:-1] if place == "last, cut short" else written)
    (text,) = folder.drop_lines_after(2)
    assert text == "metrics.jsonl had 1 line that cannot be read; moved to metrics.superseded.jsonl"
    assert folder.metrics.read_bytes() == good[0] + good[1]
    aside = (tmp_path / "metrics.superseded.jsonl").read_bytes()
    assert sorted(aside.splitlines()) == sorted([bad.rstrip(b"\n"), good[2].rstrip(b"\n")])
    assert folder.drop_lines_after(2) == []


def test_both_files_are_named_with_what_they_had(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.metrics.write_text(line(1) + "null\n5\n")
    folder.events.write_text("[]\n")
    texts = folder.drop_lines_after(1)
    assert [text.split(";")[0] for text in texts] == [
        "metrics.jsonl had 2 lines that cannot be read",
        "events.jsonl had 1 line that cannot be read",
    ]


def test_a_file_that_cannot_be_read_is_set_aside_under_a_free_name(tmp_path: Path) -> None:
    """A link to itself stands for a disk that fails: opening it is an error, whoever tries."""
    folder = RunFolder(tmp_path)
    names = []
    for _ in range(3):
        folder.metrics.symlink_to(folder.metrics)
        (text,) = folder.drop_lines_after(0)
        assert text.startswith("metrics.jsonl cannot be read (Too many levels of symbolic links); it is now ")
        names.append(text.split("it is now ")[1])
        assert not os.path.lexists(folder.metrics)
    assert names == ["metrics.unreadable.jsonl", "metrics.unreadable-2.jsonl", "metrics.unreadable-3.jsonl"]
    assert sorted(os.listdir(tmp_path)) == sorted(names)


def test_a_run_that_starts_again_keeps_the_lines_of_the_one_before(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.metrics.write_text(line(1) + line(2))
    assert folder.drop_lines_after(0) == []
    assert folder.metrics.read_text() == ""
    assert superseded(folder) == line(1) + line(2)


# Where a run starts from


@pytest.mark.parametrize("auto", [False, True])
def test_resume_takes_the_newest_complete_one(tmp_path: Path, auto: bool) -> None:
    folder = RunFolder(tmp_path)
    for step in (10, 20):
        saved_at(step, folder.checkpoints)
    (folder.checkpoints / "step_00000030").mkdir()
    warnings: list[str] = []
    found = checkpoint_to_resume(folder, auto, warnings.append)
    assert found == folder.checkpoints / "step_00000020"
    assert len(warnings) == 1 and "step_00000030" in warnings[0]


def test_resume_without_a_checkpoint_is_refused_and_says_what_would_start(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no complete checkpoint in .*; --resume=auto starts from step 0"):
        checkpoint_to_resume(RunFolder(tmp_path), False, warn=print)


@pytest.mark.parametrize("left", ["nothing", "a save that was cut short", "steps"])
def test_auto_starts_where_no_checkpoint_was_ever_complete(tmp_path: Path, left: str) -> None:
    folder = RunFolder(tmp_path / "run")
    if left != "nothing":
        (folder.checkpoints / "step_00000010.partial").mkdir(parents=True)
    if left == "steps":
        folder.metrics.write_text(line(1))
    warnings: list[str] = []
    assert checkpoint_to_resume(folder, True, warnings.append) is None
    assert ["saved no checkpoint: it starts again from step 0" in text for text in warnings] == [True] * (
        left == "steps"
    )


@pytest.mark.parametrize("auto", [False, True])
def test_nothing_starts_over_checkpoints_that_are_all_damaged(tmp_path: Path, auto: bool) -> None:
    """They may be unreadable for a while only, and a run from step 0 would mix with them."""
    folder = RunFolder(tmp_path)
    (folder.checkpoints / "step_00000010").mkdir(parents=True)
    warnings: list[str] = []
    with pytest.raises(UserError, match=r"no complete checkpoint in .*only damaged ones.*--resume=auto"):
        checkpoint_to_resume(folder, auto, warnings.append)
    assert len(warnings) == 1


def test_load_takes_a_complete_checkpoint_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Known failure E3: a typing error must not train from random weights."""
    saved_at(10, tmp_path)
    monkeypatch.chdir(tmp_path)
    assert checkpoint_to_load(Path("step_00000010")) == tmp_path / "step_00000010"
    with pytest.raises(UserError, match="--load: step_00000011 is not a folder"):
        checkpoint_to_load(Path("step_00000011"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="empty is no whole checkpoint"):
        checkpoint_to_load(tmp_path / "empty")
    with pytest.raises(UserError, match="is not a folder"):
        checkpoint_to_load(tmp_path / ("x" * 300))


def test_load_of_a_run_folder_names_its_newest_complete_checkpoint(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    (folder.checkpoints / "step_00000030").mkdir(parents=True)
    for path in (folder.path, folder.checkpoints):
        with pytest.raises(UserError, match="none in it is complete"):
            checkpoint_to_load(path)
    for step in (8, 20):
        saved_at(step, folder.checkpoints)
    for path in (folder.path, folder.checkpoints):
        with pytest.raises(UserError) as caught:
            checkpoint_to_load(path)
        assert f"the newest complete one is {folder.checkpoints / 'step_00000020'}" in str(caught.value)
