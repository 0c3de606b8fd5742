"""``megastable plan``: tables for people, JSON for programs, pictures, and what is refused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megastable.cli.main import app
from megastable.planning import timelines
from megastable.planning.micro_batches import load_plan
from tests.support.tiny_run import run_dict
from tests.unit.cli.test_cli import PNG, exit_of_main
from tests.unit.planning.calibration_examples import cost_of_stages, file_of

REPOSITORY = Path(__file__).parents[3]
BLOOM = str(REPOSITORY / "ds_configs" / "bloom_176b.json")
TIME_LIMIT_SECONDS = 60
CPU = ("--device", "cpu", "--peak-tflops", "0.05", "--memory-gib", "4")
RAMP_KEYS = {"first_step", "first_sample", "global_batch_size", "micro_batch_size", "num_microbatches"}


@pytest.fixture
def run_file(tmp_path: Path) -> str:
    """The tiny run on two stages, as a file."""
    path = tmp_path / "run.json"
    path.write_text(json.dumps(run_dict(megastable__pipeline__num_stages=2)))
    return str(path)


def plan(*arguments: str) -> tuple[int, str]:
    """Exit code and output of the command."""
    result = CliRunner().invoke(app, ["plan", *arguments])
    return result.exit_code, result.stdout


def test_json_is_one_object_with_the_ramp_and_the_totals() -> None:
    exit_code, output = plan(BLOOM, "--devices", "384", "--device", "A100", "--json")
    assert exit_code == 0
    values = json.loads(output)
    assert all(set(entry) == RAMP_KEYS for entry in values["ramp"])
    assert values["stages"] == ["embedding + 6 blocks", *["6 blocks"] * 10, "4 blocks + head"]
    assert 0 < values["imbalance"] < 0.05
    assert (values["total_steps"], values["total_samples"]) == (115_312, 220_001_200)
    assert (12_658, 9_765_808, 2048) in [
        (entry["first_step"], entry["first_sample"], entry["global_batch_size"]) for entry in values["ramp"]
    ]


def test_tables_name_steps_layout_time_memory_and_assumptions(run_file: str) -> None:
    exit_code, output = plan(run_file, "--devices", "4", *CPU)
    assert exit_code == 0
    assert f"{run_file}: 8 steps, 64 samples, 1,024 tokens" in output
    assert "2 stages x 2 replicas x 1 tensor ranks = 4 devices\n" in output
    assert "embedding + 2 blocks" in output and "2 blocks + head" in output
    assert "predicted imbalance of the stages" in output
    assert "fits: yes" in output
    assert "unknown" not in output
    assert "assumed: a stage computes at 45% of the 0.05 TFLOPs of cpu" in output


def test_without_a_device_times_are_unknown_and_the_layout_is_said_to_be_assumed(run_file: str) -> None:
    exit_code, output = plan(run_file)
    assert exit_code == 0
    assert "time to train: unknown" in output
    assert "fits: unknown" in output
    assert "assumed: one replica" in output


def test_a_run_that_does_not_fit_is_planned_with_exit_code_0(run_file: str) -> None:
    exit_code, output = plan(run_file, "--device", "cpu", "--peak-tflops", "1", "--memory-gib", "0.005")
    assert exit_code == 0
    assert "fits: NO" in output


def test_measured_times_take_the_place_of_a_device(run_file: str, tmp_path: Path) -> None:
    calibration = tmp_path / "sweep.json"
    run_plan, _ = load_plan(Path(run_file), None)
    file_of(run_plan).write(calibration)
    exit_code, output = plan(run_file, "--calibration", str(calibration))
    assert exit_code == 0
    assert f"assumed: times are those of {calibration}, a sweep on a machine" in output
    assert "fits: yes" in output
    values = json.loads(plan(run_file, "--calibration", str(calibration), "--json")[1])
    cost = cost_of_stages(2)
    assert [phase["step_seconds"] for phase in values["phases"]] == [
        cost.step_seconds(phase.batch.micro_batch_size, phase.batch.num_microbatches) for phase in run_plan.phases
    ]


def test_search_shows_the_fastest_layouts_and_the_reasons(run_file: str) -> None:
    exit_code, output = plan(run_file, "--devices", "4", *CPU, "--search")
    assert exit_code == 0
    assert "layouts are feasible" in output
    assert "infeasible, " in output
    exit_code, output = plan(run_file, "--devices", "4", *CPU, "--search", "--json")
    layouts = json.loads(output)["layouts"]
    assert exit_code == 0
    assert layouts[0]["reason"] is None
    assert layouts[0]["seconds_to_train"] == min(entry["seconds_to_train"] or 1e9 for entry in layouts)


def test_the_search_needs_no_layout_that_fits(run_file: str) -> None:
    """The file's two stages do not divide three devices."""
    exit_code, output = plan(run_file, "--devices", "3", *CPU, "--search", "--json")
    assert exit_code == 0
    assert {entry["num_stages"] for entry in json.loads(output)["layouts"] if not entry["reason"]} == {3}


@pytest.mark.parametrize("device", [(), CPU], ids=["no device", "a device"])
def test_plot_draws_the_ramp(run_file: str, tmp_path: Path, device: tuple[str, ...]) -> None:
    output = tmp_path / "ramp.png"
    assert plan(run_file, *device, "--plot", str(output))[0] == 0
    assert output.read_bytes().startswith(PNG)


@pytest.mark.parametrize("device", [(), CPU], ids=["no device", "a device"])
def test_a_timeline_is_a_page_with_every_pass_of_every_shape(
    run_file: str, tmp_path: Path, device: tuple[str, ...]
) -> None:
    output = tmp_path / "step.html"
    assert plan(run_file, *device, "--timeline", str(output))[0] == 0
    page = output.read_text()
    microbatches = load_plan(Path(run_file), None)[0].phases[0].batch.num_microbatches
    for shape, chunks in (("1f1b", 1), ("zb_h1", 1), ("v", 2)):
        drawn = page.split(f'aria-label="{shape}"')[1].split("</svg>")[0]
        assert drawn.count("<title>forward") == 2 * chunks * microbatches
    # A page for a talk has to open anywhere.
    assert not re.search(r"(src|href)=|url\(|@import", page)


def test_a_timeline_escapes_the_name_of_the_run_file(tmp_path: Path) -> None:
    path = tmp_path / "a<b>&.json"
    path.write_text(json.dumps(run_dict(megastable__pipeline__num_stages=2)))
    output = tmp_path / "step.html"
    assert plan(str(path), "--timeline", str(output))[0] == 0
    assert "a&lt;b&gt;&amp;.json" in output.read_text()
    assert "<b>&" not in output.read_text()


def test_a_timeline_is_a_trace_whose_step_of_1f1b_is_a_second_where_no_device_is_known(
    run_file: str, tmp_path: Path
) -> None:
    output = tmp_path / "step.json"
    assert plan(run_file, "--timeline", str(output))[0] == 0
    trace = json.loads(output.read_text())
    passes = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {event["pid"] for event in passes} == {0, 1, 2}
    ends = [event["ts"] + event["dur"] for event in passes if event["pid"] == 0]
    assert max(ends) == pytest.approx(1e6)
    assert "1F1B" in trace["otherData"]["unit"]


def test_a_timeline_of_too_many_passes_is_refused(
    run_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "step.html"
    monkeypatch.setattr(timelines, "MOST_PASSES", 7)
    assert exit_of_main(monkeypatch, "plan", run_file, "--timeline", str(output)) == 2
    assert "at most 7 are drawn" in capsys.readouterr().err
    assert not output.exists()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--device", "B17"), "--device B17"),
        (("--device", "cpu", "--memory-gib", "4"), "--peak-tflops"),
        (("--device", "cpu", "--search"), "--peak-tflops"),
        (("--search",), "--device"),
        (("--search", "--calibration", "sweep.json"), "--search"),
        (("--calibration", "missing.json"), "missing.json: cannot be read"),
        (("--calibration", "sweep.json", "--device", "A100"), "--calibration"),
        (("--save-calibration", "new.json"), "--save-calibration"),
        (("--save-calibration", "new.json", "--device", "A100"), "--save-calibration"),
        (("--save-calibration", "new.json", *CPU), "--save-calibration"),
        (("--save-calibration", "nowhere/new.json", "--device", "cpu"), "nowhere/new.json"),
        (("--devices", "3"), "world size 3"),
        (("--plot", "out.doc"), "out.doc"),
        (("--timeline", "out.doc"), "must end in .html or .json"),
        (("--timeline", "nowhere/out.html"), "--timeline nowhere/out.html"),
        (("--timeline", "out.html", "--search", *CPU), "--timeline"),
    ],
)
def test_a_users_mistake_is_one_message_and_exit_code_2(
    run_file: str,
    options: tuple[str, ...],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert exit_of_main(monkeypatch, "plan", run_file, *options) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert says in captured.err


def test_it_needs_no_torch(tmp_path: Path) -> None:
    calibration = tmp_path / "sweep.json"
    file_of(load_plan(Path(BLOOM), 384)[0]).write(calibration)
    script = (
        "import sys; sys.modules.update(torch=None, deepspeed=None, numpy=None); "
        f"sys.argv = ['megastable', 'plan', {BLOOM!r}, '--devices', '384', '--calibration', {str(calibration)!r}]; "
        "from megastable.cli.main import main; main()"
    )
    finished = subprocess.run(
        [sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, timeout=TIME_LIMIT_SECONDS
    )
    assert finished.returncode == 0, finished.stderr
    assert "12,658" in finished.stdout


def test_bloom_is_planned_within_a_second_of_computing() -> None:
    started = time.process_time()
    assert plan(BLOOM, "--devices", "384", "--device", "A100", "--json")[0] == 0
    assert time.process_time() - started < 1


def test_the_help_names_the_keys_of_the_json() -> None:
    words = " ".join(plan("--help")[1].split())
    assert all(word in words for word in (*sorted(RAMP_KEYS), "total_steps", "total_tokens", "--search", "Exit code 0"))
