"""Whatever stands in a run file, it is accepted, or refused with a message, soon: nothing else happens."""

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megastable.config import ConfigError, load_run_file
from megastable.planning.preflight.preflight import preflight
from tests.unit.config.run_file_mutations import mutated_runs, overrides

MOST_SECONDS = 2.0
"""Of this process's own processor time, so that other work on the machine fails no test."""


def outcome_of(path: Path, overrides: list[str], world_size: int | None) -> str:
    """Load a run file and review it; return whether it was accepted or refused."""
    begin = time.process_time()
    try:
        load_run_file(path, overrides, world_size)
        outcome = "accepted"
    except ConfigError as error:
        # One line a fault, and nothing in them that a terminal would obey.
        first, *faults = str(error).split("\n")
        assert len(faults) == len(error.faults) > 0
        assert all(line.isprintable() for line in (first, *faults))
        outcome = "refused"
    if outcome == "accepted":
        preflight(path, world_size, (), lambda source: None, overrides)
    assert time.process_time() - begin < MOST_SECONDS
    return outcome


def test_a_run_file_is_accepted_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    outcomes: Counter[str] = Counter()

    @settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(raw=mutated_runs(), changes=overrides, world_size=st.sampled_from([None, 1, 2, 64, 999_999]))
    def check(raw: dict[str, Any], changes: list[str], world_size: int | None) -> None:
        path.write_text(json.dumps(raw), encoding="utf-8")
        outcomes[outcome_of(path, changes, world_size)] += 1

    check()
    # A fuzz of which every file is refused for the same reason would test nothing.
    assert outcomes.keys() == {"accepted", "refused"}


@settings(max_examples=100, deadline=None)
@given(content=st.binary(max_size=60) | st.text(alphabet='{}[]":,0919eE.-\\u tfn', max_size=60).map(str.encode))
def test_any_bytes_are_refused(content: bytes, tmp_path_factory: Any) -> None:
    path = tmp_path_factory.getbasetemp() / "bytes.json"
    path.write_bytes(content)
    assert outcome_of(path, [], None) == "refused"
