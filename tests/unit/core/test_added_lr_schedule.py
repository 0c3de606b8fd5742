"""A learning-rate schedule of one dataclass and one line works wherever a schedule is read."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
from typer.testing import CliRunner

from megastable.cli.main import app
from megastable.config import load_run_file
from megastable.core.lr_schedule import LR_SCHEDULES, DecaySchedule
from megastable.planning.run_plan import RunPlan

QUICKSTART = Path(__file__).parents[3] / "ds_configs" / "quickstart.json"


@dataclass(frozen=True)
class Quadratic(DecaySchedule):
    """Falls along a parabola."""

    def share_left(self, samples: int) -> float:
        return (1.0 - self.progress(samples, self.warmup_samples)) ** 2


@pytest.fixture
def run_file(tmp_path: Path) -> Iterator[Path]:
    """Write the quickstart with the schedule, which is in the registry as long as the test runs."""
    settings = json.loads(QUICKSTART.read_text())
    settings["megastable"]["lr_schedule"] = {"type": "quadratic", "warmup": {"fraction": 0.1}, "min_lr": 1e-4}
    path = tmp_path / "quadratic.json"
    path.write_text(json.dumps(settings))
    with mock.patch.dict(LR_SCHEDULES, {"quadratic": Quadratic}):
        yield path


@pytest.mark.parametrize("command", [["check", "--world-size", "2"], ["plan", "--devices", "2"]])
def test_the_commands_take_it(run_file: Path, command: list[str]) -> None:
    result = CliRunner().invoke(app, [*command, str(run_file)])
    assert result.exit_code == 0, result.output


def test_a_run_is_planned_with_its_learning_rates(run_file: Path) -> None:
    run = load_run_file(run_file, world_size=2)
    plan = RunPlan.of(run, 2)
    final = plan.phases[-1].batch
    warmup = run.megastable.lr_schedule.warmup.to_samples(plan.length.total_samples, run.megastable.model.seq_length)
    halfway = warmup + (plan.length.last_step_start - warmup) // 2
    assert plan.learning_rate(warmup, final) == run.optimizer.params.lr
    assert plan.learning_rate(plan.length.last_step_start, final) == 1e-4
    expected = 1e-4 + (run.optimizer.params.lr - 1e-4) / 4
    assert plan.learning_rate(halfway, final) == pytest.approx(expected, rel=1e-2)
