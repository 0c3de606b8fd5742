"""What a sweep says of a plan, as a table, as a file and as pictures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megastable.cli.sweep import (
    SECONDS,
    check_can_plot,
    comparison,
    conclusions,
    curves,
    plot_paths,
    plot_sweep,
    show_sweep,
)
from megastable.core.errors import UserError
from megastable.core.pipeline_cost import StageTime
from megastable.planning.calibration import Calibration, read_calibration_file
from megastable.planning.data_sheet_cost import relative_cost
from megastable.planning.run_plan import RunPlan
from megastable.planning.sweep import SweepReport, as_section, measured_sweep, planned_sweep, work_of
from tests.unit.cli.test_cli import PNG
from tests.unit.planning.calibration_examples import SIZES, cost_of_stages, file_of, made_seconds
from tests.unit.planning.plan_examples import plan_of


@pytest.fixture
def plan() -> RunPlan:
    """Plan the tiny run on two stages and two replicas."""
    return plan_of(4, megastable__pipeline__num_stages=2)


@pytest.fixture
def report(plan: RunPlan) -> SweepReport:
    """Report steps whose cost is shared among the stages as the plan's operations are."""
    return measured_sweep(plan, made_seconds(plan, relative_cost(plan)), share=0.5)


def test_steps_that_the_model_makes_are_predicted_from_half_of_them(report: SweepReport) -> None:
    seen = [row for row in report.rows if row.calibrated_on]
    assert 0 < len(seen) < len(report.rows)
    assert report.median_unseen_error == pytest.approx(0, abs=1e-9)
    assert report.recommended is not None
    assert report.recommended.global_batch_size in SIZES


def test_the_median_ignores_one_slow_step(plan: RunPlan, report: SweepReport) -> None:
    for row in report.rows:
        assert row.step_seconds is not None
        assert row.step_seconds.median == row.step_seconds.least
        assert row.step_seconds.most == pytest.approx(3 * row.step_seconds.least)


def test_a_plan_is_swept_without_measuring(plan: RunPlan) -> None:
    batches = list(made_seconds(plan, relative_cost(plan)))
    unknown = planned_sweep(plan, batches, 0.5, None)
    assert unknown.recommended is None
    assert {row.predicted_step_seconds for row in unknown.rows} == {None}
    predicted = planned_sweep(plan, batches, 0.5, cost_of_stages(2))
    assert all(row.predicted_step_seconds and row.step_seconds is None for row in predicted.rows)
    assert predicted.recommended in batches
    with pytest.raises(ValueError, match="measured"):
        as_section(unknown)


def test_the_table_has_a_row_a_batch_and_the_conclusions(
    report: SweepReport, capsys: pytest.CaptureFixture[str]
) -> None:
    show_sweep(report, "tiny")
    lines = capsys.readouterr().out.splitlines()
    assert "…" not in "".join(lines)
    rows = [line.split() for line in lines[2 : 2 + len(report.rows)]]
    assert [(int(row[0]), int(row[1]), int(row[3])) for row in rows] == [
        (row.global_batch_size, row.num_microbatches, row.micro_batch_size) for row in report.rows
    ]
    assert lines[-2:] == conclusions(report)
    assert "recommended start of a ramp: global batch" in lines[-2]
    assert "it has not seen: 0%" in lines[-1] or "e-" in lines[-1]


def test_a_calibration_from_elsewhere_is_judged_on_every_batch(plan: RunPlan, report: SweepReport) -> None:
    assert report.cost is not None
    shorter = replace(report.cost, stages=tuple(
        StageTime(*(replace(one, seconds_per_sample=0.9 * one.at(1)) for one in (stage.forward, stage.backward)))
        for stage in report.cost.stages
    ))  # fmt: skip
    said = comparison(report, Calibration(shorter, None, "probe.json"))
    assert said.startswith(f"median error of probe.json: 10.0% over all {len(report.rows)} batches (-10.0%")


def test_the_sweep_is_in_the_calibration_file(plan: RunPlan, report: SweepReport, tmp_path: Path) -> None:
    path = tmp_path / "sweep.json"
    file_of(plan).model_copy(update={"sweep": as_section(report)}).write(path)
    found = read_calibration_file(path).sweep
    assert found is not None
    assert list(found.rows) == report.rows
    assert found.share == 0.5


def test_a_picture_and_a_page_that_needs_no_network(plan: RunPlan, report: SweepReport, tmp_path: Path) -> None:
    prefix = tmp_path / "sweep.v1"
    check_can_plot(prefix)
    plot_sweep(report.rows, work_of(plan), prefix, "tiny")
    picture, page = plot_paths(prefix)
    assert (picture.name, page.name) == ("sweep.v1.png", "sweep.v1.html")
    assert picture.read_bytes().startswith(PNG)
    text = page.read_text(encoding="utf-8")
    assert "micro-batches of 2, measured" in text
    assert "<script src=" not in text.replace('charset="utf-8" ', "")
    with pytest.raises(UserError, match="exists already"):
        check_can_plot(prefix)


def test_a_curve_has_every_batch_of_its_micro_batch_size(plan: RunPlan, report: SweepReport) -> None:
    one, two = curves(report.rows, work_of(plan), SECONDS)
    assert (one.micro_batch_size, two.micro_batch_size) == (1, 2)
    assert one.global_batch_sizes == two.global_batch_sizes == list(SIZES)
    assert one.least == one.measured
    assert one.predicted == pytest.approx(one.measured)
