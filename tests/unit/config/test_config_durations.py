"""training.time_limit: seconds, or what SLURM's --time takes; everything else is one message."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.config import run_from_dict
from megastable.config.limits import MOST_SECONDS
from megastable.config.run_config import run_as_dict
from tests.unit.config.config_examples import MINIMAL, faults_of, with_value

quick = settings(max_examples=25, deadline=None)  # no deadline: the machine may be busy
KEY = "megastable.training.time_limit"


def seconds_of(value: Any) -> float | None:
    """Return the limit of a run file with this value, which its dump has to keep."""
    run = run_from_dict(with_value(MINIMAL, KEY, value))
    assert run_from_dict(run_as_dict(run)) == run
    return run.megastable.training.time_limit


@quick
@given(st.integers(0, 364), st.integers(0, 23), st.integers(0, 59), st.integers(1, 59))
def test_a_clock_is_a_number_of_seconds(days: int, hours: int, minutes: int, seconds: int) -> None:
    expected = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    assert seconds_of(f"{days}-{hours:02}:{minutes:02}:{seconds:02}") == expected
    assert seconds_of(f"{days * 24 + hours}:{minutes:02}:{seconds:02}") == expected
    assert seconds_of(expected) == expected


def test_no_limit_and_a_part_of_a_second() -> None:
    assert seconds_of(None) is None
    assert seconds_of(0.5) == 0.5


@pytest.mark.parametrize(
    "value",
    [0, -1, True, MOST_SECONDS + 1, 10**400, "", "60", "1:30", "00:60:00", "00:00:60", "00:00:00", "1:00:00\n",
     "-1:00:00", "9999-00:00:00", "٣:00:00", [60], {}],
)  # fmt: skip
def test_everything_else_is_one_message(value: Any) -> None:
    (fault,) = faults_of(with_value(MINIMAL, KEY, value))
    assert fault.path == KEY and '"HH:MM:SS" or "D-HH:MM:SS"' in fault.message
