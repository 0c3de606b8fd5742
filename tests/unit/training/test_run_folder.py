"""A run's folder: nothing is written over, no line of metrics is lost, and only the same run continues."""

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megastable.core.checkpoint_folder import Manifest, read_manifest

from megastable.config import RunConfig, load_run_file, run_from_dict
from megastable.config.run_config import differences, run_as_dict
from megastable.core.errors import UserError
from megastable.training.run_folder import (
    FIXED_KEYS,
    RunFolder,
    check_continues,
    checkpoint_to_load,
    checkpoint_to_resume,
)
from tests.support.tiny_run import tiny_run

quick = settings(max_examples=25, deadline=None)  # no deadline: the machine may be busy
RUN_FILES = Path(__file__).parents[3] / "ds_configs"
SHIPPED = sorted(path for path in RUN_FILES.glob("*.json") if not path.name.endswith(".schema.json"))


def write_checkpoint(run: RunConfig, folder: Path, world_size: int = 1) -> Path:
    """Write a complete checkpoint without weights."""
    folder.mkdir(parents=True)
    Manifest({"step": 1}, run_as_dict(run), "", world_size, {}, {}).write(folder)
    return folder


def manifest_of(run: RunConfig, world_size: int = 1) -> Manifest:
    """Return the manifest of a checkpoint of ``run``, as it comes back from its file."""
    with tempfile.TemporaryDirectory() as name:
        return read_manifest(write_checkpoint(run, Path(name) / "step_00000001", world_size))


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
    advice = "Remove the folder.*--run-dir" if left == "metrics" else "--resume.*--run-dir"
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


# Where a run starts from


def test_resume_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with pytest.raises(UserError, match="no complete checkpoint"):
        checkpoint_to_resume(folder, warn=print)
    (folder.checkpoints / "step_00000010").mkdir(parents=True)
    warnings: list[str] = []
    with pytest.raises(UserError, match="no complete checkpoint"):
        checkpoint_to_resume(folder, warnings.append)
    assert len(warnings) == 1


def test_resume_takes_the_newest_complete_one(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for step in (10, 20):
        write_checkpoint(tiny_run(), folder.checkpoints / f"step_{step:08d}")
    (folder.checkpoints / "step_00000030").mkdir()
    assert checkpoint_to_resume(folder, warn=print).name == "step_00000020"


def test_load_takes_a_complete_checkpoint_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Known failure E3: a typing error must not train from random weights."""
    write_checkpoint(tiny_run(), tmp_path / "step_00000010")
    monkeypatch.chdir(tmp_path)
    assert checkpoint_to_load(Path("step_00000010")) == tmp_path / "step_00000010"
    with pytest.raises(UserError, match="--load: step_00000011 is not a folder"):
        checkpoint_to_load(Path("step_00000011"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no complete checkpoint"):
        checkpoint_to_load(tmp_path / "empty")


def test_load_of_a_run_folder_names_its_newest_complete_checkpoint(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    (folder.checkpoints / "step_00000030").mkdir(parents=True)
    for path in (folder.path, folder.checkpoints):
        with pytest.raises(UserError, match="none in it is complete"):
            checkpoint_to_load(path)
    for step in (8, 20):
        write_checkpoint(tiny_run(), folder.checkpoints / f"step_{step:08d}")
    for path in (folder.path, folder.checkpoints):
        with pytest.raises(UserError) as caught:
            checkpoint_to_load(path)
        assert f"the newest complete one is {folder.checkpoints / 'step_00000020'}" in str(caught.value)


# Only the same run continues

# One change for every key that a checkpoint's meaning depends on. Values are (before, after) for the tiny run.
FROZEN_CHANGES: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {
    "megastable.model": [
        ({}, {"megastable__model__hidden_size": 64}),
        ({}, {"megastable__model__num_layers": 5}),
        ({}, {"megastable__model__num_key_value_heads": 2}),
        ({"megastable__model__num_key_value_heads": 2}, {}),
        ({}, {"megastable__model__dropout": 0.1}),
    ],
    "megastable.pipeline.num_stages": [({}, {"megastable__pipeline__num_stages": 2})],
    "megastable.tensor_parallel": [
        ({}, {"megastable__tensor_parallel": {"size": 2}}),
        (
            {"megastable__tensor_parallel": {"size": 2}},
            {"megastable__tensor_parallel": {"size": 2, "sequence_parallel": True}},
        ),
    ],
    "megastable.init": [
        ({}, {"megastable__init": {"scheme": "fixed", "std": 0.02}}),
        ({"megastable__init": {"scheme": "fixed", "std": 0.02}}, {"megastable__init": {"scheme": "fixed", "std": 0.1}}),
    ],
    "megastable.data.source": [({}, {"megastable__data__source": {"type": "text", "path": "x"}})],
    "megastable.data.tokenizer": [({}, {"megastable__data__tokenizer": {"type": "bpe", "vocab_size": 300}})],
    "megastable.data.validation_fraction": [({}, {"megastable__data__validation_fraction": 0.123})],
    "megastable.training.seed": [({}, {"megastable__training__seed": 8})],
    "fp16.enabled": [({}, {"fp16__enabled": True})],
    "bf16.enabled": [({}, {"bf16__enabled": True}), ({"bf16__enabled": True}, {})],
    "data_types": [
        ({"bf16__enabled": True}, {"bf16__enabled": True, "data_types__grad_accum_dtype": "fp32"}),
        ({"bf16__enabled": True, "data_types__grad_accum_dtype": "fp32"}, {"bf16__enabled": True}),
    ],
}
FREE_CHANGES: dict[str, dict[str, Any]] = {
    "optimizer.params.lr": {"optimizer__params__lr": 0.005},
    "gradient_clipping": {"gradient_clipping": 1.0},
    "train_micro_batch_size_per_gpu": {"train_micro_batch_size_per_gpu": 2},
    "megastable.batch_rampup.samples_per_increment": {"megastable__batch_rampup__samples_per_increment": 24},
    "megastable.lr_schedule.min_lr": {"megastable__lr_schedule__min_lr": 0.0},
    "megastable.training.total_steps": {"megastable__training__total_steps": 9},
    "megastable.training.eval_interval": {"megastable__training__eval_interval": 3},
    "megastable.checkpoint.save_interval": {"megastable__checkpoint__save_interval": 77},
    "megastable.logging.interval": {"megastable__logging__interval": 77},
    "megastable.pipeline.activation_checkpointing": {"megastable__pipeline__activation_checkpointing": True},
    "megastable.model.compile": {"megastable__model__compile": True},
    "megastable.training.loss_chunk_tokens": {"megastable__training__loss_chunk_tokens": 64},
    "fp16.initial_scale_power": {"fp16__initial_scale_power": 5},
}


def test_every_frozen_key_has_a_row_here() -> None:
    assert FROZEN_CHANGES.keys() == set(FIXED_KEYS)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_an_unchanged_run_continues_without_a_word(path: Path) -> None:
    run = load_run_file(path)
    warnings: list[str] = []
    check_continues(manifest_of(run, world_size=24), run, 24, warnings.append)
    assert warnings == []


@pytest.mark.parametrize(
    ("key", "before", "after"),
    [(key, before, after) for key, rows in FROZEN_CHANGES.items() for before, after in rows],
)
def test_a_change_of_the_checkpoints_meaning_is_refused(
    key: str, before: dict[str, Any], after: dict[str, Any]
) -> None:
    saved, now = tiny_run(**before), tiny_run(**after)
    with pytest.raises(UserError) as caught:
        check_continues(manifest_of(saved), now, 1, warn=print)
    named = [text.strip().split(":")[0] for text in str(caught.value).splitlines()[1:]]
    assert named
    assert all(name == key or name.startswith(f"{key}.") for name in named)
    assert " in the checkpoint, " in str(caught.value)


@pytest.mark.parametrize(("key", "change"), FREE_CHANGES.items())
def test_any_other_change_is_reported_with_both_values(key: str, change: dict[str, Any]) -> None:
    warnings: list[str] = []
    saved, now = tiny_run(), tiny_run(**change)
    check_continues(manifest_of(saved), now, 1, warnings.append)
    (warning,) = warnings
    ((changed, old, new),) = differences(run_as_dict(saved), run_as_dict(now))
    assert changed == key
    assert f"{key} was {old!r}, is {new!r}" in warning


def test_another_world_is_refused_with_both_layouts() -> None:
    run = tiny_run(megastable__pipeline__num_stages=2)
    with pytest.raises(UserError, match=r"4 processes \(2 stages x 2 replicas x 1 tensor ranks\), this launch of 2"):
        check_continues(manifest_of(run, world_size=4), run, 2, warn=print)


def test_all_reasons_are_named_at_once() -> None:
    changed = tiny_run(megastable__model__hidden_size=64, megastable__training__seed=8, optimizer__params__lr=0.02)
    warnings: list[str] = []
    with pytest.raises(UserError) as caught:
        check_continues(manifest_of(tiny_run(), world_size=2), changed, 1, warnings.append)
    text = str(caught.value)
    assert "2 processes" in text
    assert "megastable.model.hidden_size: 32 in the checkpoint, 64 now" in text
    assert "megastable.training.seed: 7 in the checkpoint, 8 now" in text
    assert "lr" not in text
    assert len(warnings) == 1


# differences

json_values = st.recursive(
    st.none() | st.integers(0, 3) | st.sampled_from(["a", "b"]),
    lambda inner: st.dictionaries(st.sampled_from("xyz"), inner, max_size=3) | st.lists(inner, max_size=2),
    max_leaves=8,
)
objects = st.dictionaries(st.sampled_from("xyz"), json_values, max_size=3)


def value_at(values: Any, path: str) -> Any:
    """Find the value at a dotted path; None where the path ends earlier."""
    for key in path.split("."):
        values = values.get(key) if isinstance(values, dict) else None
    return values


@quick
@given(objects)
def test_a_value_does_not_differ_from_itself(values: dict[str, Any]) -> None:
    assert list(differences(values, json.loads(json.dumps(values)))) == []


@quick
@given(objects, objects)
def test_differences_name_where_and_what(old: dict[str, Any], new: dict[str, Any]) -> None:
    found = list(differences(old, new))
    for path, before, after in found:
        assert before == value_at(old, path)
        assert after == value_at(new, path)
        assert before != after
    assert [(path, after, before) for path, before, after in found] == list(differences(new, old))
    merged = json.loads(json.dumps(old))
    for path, _, after in found:
        *parents, key = path.split(".")
        section = merged
        for parent in parents:
            section = section[parent]
        section[key] = after
    assert list(differences(merged, new)) == []


def test_a_missing_key_stands_as_none() -> None:
    assert list(differences({"a": {"b": 1}}, {"a": {}, "c": 2})) == [("a.b", 1, None), ("c", None, 2)]


# Where the stages are cut

OTHER_CUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "another list": ({"partition": [4, 4]}, {"partition": [5, 3]}),
    "another method": ({"partition": "type:block"}, {"partition": "balanced"}),
    "cheaper blocks under the same method": ({"activation_checkpointing": True}, {"activation_checkpointing": False}),
}


def two_stages(pipeline: dict[str, Any]) -> RunConfig:
    """Make a run whose model has a head that costs 3.2 of its blocks, so that recomputation moves the cut."""
    changes = {f"megastable__pipeline__{key}": value for key, value in pipeline.items()}
    sizes = {"hidden_size": 32, "num_layers": 8, "seq_length": 16, "vocab_size": 1150}
    return tiny_run(
        **{f"megastable__model__{key}": value for key, value in sizes.items()},
        megastable__pipeline__num_stages=2,
        **changes,
    )


@pytest.mark.parametrize("name", OTHER_CUTS)
def test_stages_that_hold_other_layers_are_refused_and_the_way_back_is_named(name: str) -> None:
    before, after = OTHER_CUTS[name]
    saved, now = two_stages(before), two_stages(after)
    with pytest.raises(UserError) as caught:
        check_continues(manifest_of(saved, world_size=2), now, 2, warn=lambda text: None)
    (line,) = str(caught.value).splitlines()[1:]
    assert "megastable.pipeline.partition: the stages hold" in line
    kept = json.loads(line.split("write ")[1].split(" to keep")[0])
    check_continues(manifest_of(saved, 2), two_stages({**after, "partition": kept}), 2, warn=lambda text: None)


def test_a_checkpoint_that_does_not_say_how_it_was_cut_is_refused() -> None:
    run = two_stages({})
    manifest = manifest_of(run, world_size=2)
    del manifest.run["megastable"]["pipeline"]["partition"]
    with pytest.raises(UserError, match="of an older version"):
        check_continues(manifest, run, 2, warn=lambda text: None)
