"""Which keys of the learning-rate schedule belong to which type."""

from dataclasses import fields

import pytest

from megastable.config import json_schema
from megastable.config.lr_schedule import SCHEDULE_FIELDS, LrScheduleConfig, types_that_read
from megastable.core.lr_schedule import LR_SCHEDULES
from tests.unit.config.config_examples import MINIMAL, faults_of


@pytest.mark.parametrize("key", SCHEDULE_FIELDS)
@pytest.mark.parametrize("name", LR_SCHEDULES)
def test_a_schedule_takes_the_keys_that_it_reads_and_no_other(name: str, key: str) -> None:
    values = {"decay": 900, "min_lr": 1e-4, "stable": 800, "step_interval": 10, "step_factor": 0.1}
    faults = faults_of(MINIMAL, (f"megastable.lr_schedule.type={name}", f"megastable.lr_schedule.{key}={values[key]}"))
    if name in types_that_read(key):
        assert faults == ()
    else:
        (fault,) = faults
        assert fault.path == f"megastable.lr_schedule.{key}"
        assert all(legal in fault.message for legal in types_that_read(key))


def test_every_field_of_a_schedule_has_its_key() -> None:
    read = {field.name for schedule in LR_SCHEDULES.values() for field in fields(schedule)}
    assert read == {"max_lr", "warmup_samples", *SCHEDULE_FIELDS.values()}, (
        "a field needs its key in SCHEDULE_FIELDS, and its value in planning/run_plan.py: learning_rate_schedule"
    )
    assert LrScheduleConfig.model_fields.keys() >= SCHEDULE_FIELDS.keys()


def test_a_schedule_is_legal_in_a_run_file_once_it_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    choose = ("megastable.lr_schedule.type=toy",)
    assert faults_of(MINIMAL, choose)
    monkeypatch.setitem(LR_SCHEDULES, "toy", LR_SCHEDULES["linear"])
    assert faults_of(MINIMAL, choose) == ()
    assert "toy" in json_schema()["$defs"]["LrScheduleConfig"]["properties"]["type"]["enum"]
