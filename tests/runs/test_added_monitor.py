"""A monitor that is added by one line of the registry is part of a run: its events, its numbers and its memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

import pytest

from megastable.checkpoints.folder import folder_name
from megastable.checkpoints.manifest import read_manifest
from megastable.config import load_run_file
from megastable.core.errors import UserError
from megastable.core.launch import Launch
from megastable.monitors import MONITORS
from megastable.planning.run_plan import RunPlan
from megastable.training import build
from megastable.training.run_folder import RunFolder
from megastable.training.start import Start
from tests.support.launches import metrics, write_run_file
from tests.support.scripts import train_and_resume
from tests.support.tiny_run import tiny_run
from tests.support.toy_monitor import METRIC, LearningRateProgress, planned_learning_rates

SAVE_AT = 3


def add_toy_monitor() -> None:
    """Add the monitor in this process, for all that it does later."""
    MONITORS["toy"] = LearningRateProgress


def events(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]


def test_a_new_monitor_is_in_metrics_events_and_checkpoints_and_goes_on_after_a_resume(tmp_path: Path) -> None:
    one_stage = {"megastable__pipeline": {"num_stages": 1}}
    run_file = write_run_file(tmp_path, megastable__checkpoint__save_interval=SAVE_AT, **one_stage)
    plan = RunPlan.of(load_run_file(run_file), world_size=1)
    whole, resumed = train_and_resume(run_file, tmp_path, SAVE_AT, first=add_toy_monitor)

    rows = metrics(whole)
    rates = list(planned_learning_rates(plan))
    assert [row["lr"] for row in rows] == rates, "the toy adds up what it is shown, which has to be what was applied"
    expected = [sum(rates[: row["step"]]) / sum(rates) for row in rows]
    assert [row[METRIC] for row in rows] == pytest.approx(expected)
    assert [row[METRIC] for row in metrics(resumed)] == [row[METRIC] for row in rows]

    half_way = [event for event in events(whole) if event["kind"] == "half_way"]
    assert [event["step"] > SAVE_AT for event in half_way] == [True], "the resumed run has to meet it, too"
    assert [event for event in events(resumed) if event["kind"] == "half_way"] == half_way

    remembered = read_manifest(whole / "checkpoints" / folder_name(SAVE_AT)).monitors
    assert remembered["toy"] == {"used": pytest.approx(sum(rates[:SAVE_AT])), "planned": pytest.approx(sum(rates))}


class Colliding(LearningRateProgress):
    """Measures under a name that every step has."""

    metric_names = ("grad_norm",)


def go_no_further(*arguments: Any, **keywords: Any) -> NoReturn:
    """Stand for the first thing that takes time. To connect would end this process at a failure."""
    raise AssertionError("the run was not refused")


def test_a_metric_of_a_name_in_use_is_refused_before_anything_else_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MONITORS, "toy", Colliding)
    monkeypatch.setattr(build, "prepare_corpus", go_no_further)
    plan = RunPlan.of(tiny_run(), world_size=1)
    with pytest.raises(UserError, match="grad_norm, measured by the monitor toy, is a metric of the step itself"):
        build.train(
            Start(plan, None, None, go_no_further, ()), Launch.detect({}), RunFolder(tmp_path / "run"), lock=None
        )
    assert not (tmp_path / "run").exists()
