"""Micro-batch sizes that the program chooses: by the calibration, within its memory, once and on record."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.config import RunConfig, load_run_file, run_from_dict
from megastable.config.run_config import run_as_dict
from megastable.core.devices import DEVICES, Device
from megastable.core.errors import UserError
from megastable.core.layout import ParallelLayout
from megastable.core.records import FRESH
from megastable.planning.data_sheet_cost import Machine
from megastable.planning.memory import stage_memory
from megastable.planning.micro_batches import load_plan, with_chosen_micro_batches, with_recorded_micro_batches
from megastable.planning.preflight.preflight import preflight
from megastable.planning.run_plan import RunPlan
from megastable.planning.search import search_layouts
from megastable.training.entry import run_command
from megastable.training.host import look_at_text
from megastable.training.run_folder import RunFolder
from megastable.training.start import RunRequest
from tests.support.calibrations import write_calibration
from tests.support.checkpoints import write_checkpoint
from tests.support.tiny_run import run_dict

quick = settings(max_examples=25, deadline=None)
RAMP = {"start": 4, "increment": 4, "final": 24, "samples_per_increment": 12}
COSTLY, FREE = 0.9, 0.0
"""Seconds of a micro-batch whatever its size, where a sample takes 0.1: few are best, or many."""


def auto_dict(calibration: Path | str, **changes: Any) -> dict[str, Any]:
    """Build the tiny run on two stages, with micro-batch sizes that are to be chosen."""
    ramp = {**RAMP, "micro_batch_size": "auto", "calibration": str(calibration)}
    return run_dict(megastable__pipeline={"num_stages": 2}, megastable__batch_rampup=ramp, **changes)


def auto_run(calibration: Path | str, **changes: Any) -> RunConfig:
    """Load that run."""
    return run_from_dict(auto_dict(calibration, **changes), world_size=2)


def calibrated(folder: Path, micro_batch_seconds: float, **options: Any) -> Path:
    """Write a calibration of that run, over one that is there."""
    path = folder / "calibration.json"
    path.unlink(missing_ok=True)
    return write_calibration(path, auto_run("none"), 2, micro_batch_seconds, **options)


def sizes_of(run: RunConfig) -> tuple[tuple[int, int], ...]:
    """Return the sizes that were chosen."""
    return run.megastable.batch_rampup.chosen_micro_batch_sizes


# The choice


def test_it_goes_by_the_calibration(tmp_path: Path) -> None:
    assert sizes_of(with_chosen_micro_batches(auto_run(calibrated(tmp_path, FREE)), 2)) == ((4, 1),)
    # (m + 1)(0.9 + 0.1 d) seconds with m d = 4, 8 ... 24: a second micro-batch is worth its cost from 20 on.
    chosen = with_chosen_micro_batches(auto_run(calibrated(tmp_path, COSTLY)), 2)
    assert sizes_of(chosen) == ((4, 4), (8, 8), (12, 12), (16, 16), (20, 10), (24, 12))
    assert [phase.batch.num_microbatches for phase in RunPlan.of(chosen, 2).phases] == [1, 1, 1, 1, 2]


@quick
@given(st.floats(0.0, 1.0), st.floats(0.0, 2.0), st.booleans(), st.sampled_from([1, 2, 4]))
def test_every_batch_divides_and_fits(
    tmp_path_factory: pytest.TempPathFactory, seconds: float, spare_mib: float, on_cpu: bool, replicas: int
) -> None:
    path = tmp_path_factory.mktemp("auto") / "calibration.json"
    # What dropout keeps differs between CPU and GPU.
    changes = {"megastable__model__dropout": 0.1, "megastable__training": {"total_samples": 400}}
    run = auto_run(path, **changes)
    least = max(use.total for use in stage_memory(RunPlan.of(run, 2 * replicas), on_cpu))
    usable = least + spare_mib * 2**20
    write_calibration(path, run, 2, seconds, memory_gib=usable / 2**30, on_cpu=on_cpu)
    chosen = with_chosen_micro_batches(run, 2 * replicas)
    plan = RunPlan.of(chosen, 2 * replicas)
    assert {phase.batch.global_batch_size for phase in plan.phases} == {4, 8, 12, 16, 20, 24}
    assert max(use.total for use in stage_memory(plan, on_cpu)) <= usable * (1 + 1e-9)


def test_memory_that_no_split_fits_is_a_users_mistake(tmp_path: Path) -> None:
    path = calibrated(tmp_path, COSTLY, memory_gib=0.001)
    with pytest.raises(UserError, match=r"global batch 4 over 1 replicas fits: micro-batches of 1 .* 0.00 are usable"):
        with_chosen_micro_batches(auto_run(path), 2)


@pytest.mark.parametrize("name", [*DEVICES, "a100"])
def test_by_a_data_sheet_the_smallest_is_the_fastest(name: str) -> None:
    assert sizes_of(with_chosen_micro_batches(auto_run(name), 2)) == ((4, 1),)


@pytest.mark.parametrize("kind", ["missing", "a folder", "of another model"])
def test_a_calibration_that_cannot_be_used_is_named(tmp_path: Path, kind: str) -> None:
    path = tmp_path if kind == "a folder" else calibrated(tmp_path, FREE)
    if kind == "missing":
        path.unlink()
    changes = {"megastable__model__dropout": 0.5} if kind == "of another model" else {}
    with pytest.raises(UserError) as caught:
        with_chosen_micro_batches(auto_run(path, **changes), 2)
    assert str(path) in str(caught.value)
    assert ("megastable.model.dropout" if changes else "nor one of A100, H100, H200") in str(caught.value)


def test_a_run_that_gives_its_sizes_is_left_as_it_is() -> None:
    run = run_from_dict(run_dict())
    assert with_chosen_micro_batches(run, 2) is run


def test_sizes_are_chosen_past_the_end_of_the_run(tmp_path: Path) -> None:
    """So that it can be continued with more steps."""
    chosen = with_chosen_micro_batches(auto_run(calibrated(tmp_path, COSTLY)), 2)
    longer = run_from_dict(run_as_dict(chosen), ["megastable.training.total_steps=99"], world_size=2)
    assert RunPlan.of(longer, 2).phases[-1].batch.global_batch_size == 24


def test_only_the_replicas_need_to_divide_a_batch() -> None:
    with pytest.raises(UserError, match="data-parallel size 3"):
        run_from_dict(auto_dict("A100"), world_size=6)


# The record


def test_the_written_config_is_the_run_and_is_not_chosen_again(tmp_path: Path) -> None:
    path = calibrated(tmp_path, COSTLY)
    chosen = with_chosen_micro_batches(auto_run(path), 2)
    folder = RunFolder(tmp_path / "run")
    folder.write_config(chosen)
    path.unlink()
    loaded = load_run_file(folder.config, world_size=2)
    assert loaded == chosen
    assert with_chosen_micro_batches(loaded, 2) == chosen


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[RunPlan]:
    """Collect the plans that reach the training, in two processes of which this one is rank 0."""
    plans: list[RunPlan] = []
    build = SimpleNamespace(train=lambda start, launch, folder, lock: plans.append(start.plan))
    monkeypatch.setitem(sys.modules, "megastable.training.build", build)
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    return plans


@pytest.fixture
def fresh(tmp_path: Path) -> RunRequest:
    """Request a new run, with a calibration under which few micro-batches are best."""
    run_file = tmp_path / "auto.json"
    run_file.write_text(json.dumps(auto_dict(calibrated(tmp_path, COSTLY))))
    return RunRequest(run_file, run_dir=tmp_path / "run")


TWO_STAGES = ParallelLayout(2, 1)


@pytest.mark.parametrize("calibration", ["as it was", "another", "removed"])
@pytest.mark.parametrize("start", ["resume", "load"])
def test_a_continued_run_keeps_its_sizes(
    fresh: RunRequest, trained: list[RunPlan], tmp_path: Path, start: str, calibration: str
) -> None:
    assert run_command(fresh) == 0
    checkpoint = tmp_path / "run" / "checkpoints" / "step_00000000"
    write_checkpoint(checkpoint, trained[0].run, FRESH, TWO_STAGES)
    if calibration == "another":
        calibrated(tmp_path, FREE)
    elif calibration == "removed":
        (tmp_path / "calibration.json").unlink()
    again = RunRequest(fresh.run_file, run_dir=fresh.run_dir, resume=True)
    if start == "load":
        again = RunRequest(fresh.run_file, run_dir=tmp_path / "other", load=checkpoint)
    assert run_command(again) == 0
    assert trained[1] == trained[0]
    assert sizes_of(trained[0].run)[0] == (4, 4)


def test_a_run_that_gave_its_sizes_may_have_them_chosen_from_then_on(
    fresh: RunRequest, trained: list[RunPlan], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = run_dict(megastable__pipeline={"num_stages": 2}, megastable__batch_rampup=RAMP)
    checkpoint = write_checkpoint(tmp_path / "step_00000000", run_from_dict(before), FRESH, TWO_STAGES)
    assert run_command(RunRequest(fresh.run_file, run_dir=fresh.run_dir, load=checkpoint)) == 0
    assert sizes_of(trained[0].run)[0] == (4, 4)
    assert "micro_batch_size was None, is 'auto'" in capsys.readouterr().err


def test_sizes_are_chosen_anew_on_another_layout(fresh: RunRequest, trained: list[RunPlan], tmp_path: Path) -> None:
    assert run_command(fresh) == 0
    # Under a calibration by which few micro-batches are best, and on two replicas of one stage.
    checkpoint = write_checkpoint(tmp_path / "step_00000000", trained[0].run, FRESH, ParallelLayout(1, 2))
    expected = with_chosen_micro_batches(auto_run(calibrated(tmp_path, FREE)), 2)
    assert run_command(RunRequest(fresh.run_file, run_dir=fresh.run_dir, load=checkpoint)) == 0
    assert sizes_of(trained[1].run) == sizes_of(expected) != sizes_of(trained[0].run)


def test_without_a_calibration_a_launch_is_refused(
    fresh: RunRequest, trained: list[RunPlan], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "calibration.json").unlink()
    assert run_command(fresh) == 2
    assert "megastable.batch_rampup.calibration" in capsys.readouterr().err
    assert trained == []
    assert not (tmp_path / "run").exists()


# The tools that look ahead


def test_plan_and_check_tell_the_choice(fresh: RunRequest, trained: list[RunPlan]) -> None:
    assert run_command(fresh) == 0
    plan, _ = load_plan(fresh.run_file, 2)
    assert plan == trained[0]
    findings = preflight(fresh.run_file, 2, (), look_at_text)
    (finding,) = (each for each in findings if each.key == "megastable.batch_rampup.micro_batch_size")
    assert "from batch 4: 4 x 1, batch 8: 8 x 1, batch 12: 12 x 1" in finding.message
    assert not any("smaller micro-batch" in each.suggestion for each in findings), "advises against its own choice"


def test_a_plan_can_be_had_before_the_calibration_is_measured(fresh: RunRequest, tmp_path: Path) -> None:
    """Of micro-batches of one sample: what is measured now may be what they are to be chosen by."""
    (tmp_path / "calibration.json").unlink()
    plan, _ = load_plan(fresh.run_file, 2, choose=False)
    assert {phase.batch.micro_batch_size for phase in plan.phases} == {1}
    with pytest.raises(UserError, match="is neither a file"):
        load_plan(fresh.run_file, 2)


def test_check_lists_what_hinders_the_choice(fresh: RunRequest, tmp_path: Path) -> None:
    (tmp_path / "calibration.json").unlink()
    (finding,) = preflight(fresh.run_file, 2, (), look_at_text)
    assert (finding.level, finding.key) == ("error", "megastable.batch_rampup.calibration")


def test_the_search_tries_its_own_sizes(tmp_path: Path) -> None:
    """Of a run that has yet to choose, and of one that has: the calibration is of one layout and plays no part."""
    machine = Machine(Device("slow", dict.fromkeys(("fp32", "bf16", "fp16"), 0.001), memory_gib=1.0), efficiency=1.0)
    by_hand = run_from_dict(run_dict(megastable__pipeline={"num_stages": 2}, megastable__batch_rampup=RAMP))
    expected = search_layouts(by_hand, 4, machine)
    auto = auto_run(calibrated(tmp_path, COSTLY))
    assert search_layouts(auto, 4, machine) == expected
    assert search_layouts(with_chosen_micro_batches(auto, 2), 4, machine) == expected


def test_recorded_sizes_of_another_ramp_are_refused_by_their_name() -> None:
    auto = {"micro_batch_size": "auto", "calibration": "removed.json"}
    run = run_from_dict(run_dict(**{f"megastable__batch_rampup__{key}": value for key, value in auto.items()}))
    recorded = {"megastable": {"batch_rampup": {"chosen_micro_batch_sizes": [[4, 8]]}}}
    with pytest.raises(UserError, match="chosen_micro_batch_sizes give global batch 4 micro-batches of 8"):
        with_recorded_micro_batches(run, recorded, first_sample=11)
    # The ramp has 8 samples a step from sample 12 on, and 12 from sample 24 on.
    with pytest.raises(UserError, match="chosen_micro_batch_sizes give global batch 12 micro-batches of 8"):
        with_recorded_micro_batches(run, recorded, first_sample=12)
    recorded["megastable"]["batch_rampup"]["chosen_micro_batch_sizes"] = [[4, 6]]
    assert sizes_of(with_recorded_micro_batches(run, recorded, first_sample=24)) == ((4, 6),)
