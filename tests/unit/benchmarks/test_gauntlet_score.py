"""What the gauntlet's score says of a run: detected, named, recovered, and what it must not be taken in by."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from gauntlet.clean import CLEAN_RUNS
from gauntlet.scenario import Scenario
from gauntlet.scenarios import GROUPS, SCENARIOS
from gauntlet.score import false_alarms, score
from gauntlet.skip_step import stands_out
from gauntlet.table import clean_markdown, markdown

SCENARIO = Scenario("one", "a fault", 80, r"^warning: .*broken", r"^warning: block_2 ", "in the run")
NAMED = {"step": 83, "kind": "warning", "text": "block_2 is broken", "data": {}}


@dataclass
class Traces:
    """What a run left behind."""

    exit_codes: list[list[int | None]] = field(default_factory=lambda: [[0, 0]])
    events: list[dict[str, Any]] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    output: str = ""
    had_to_be_killed: int = 0
    final_loss: float | None = 2.0

    @property
    def first_exit_code(self) -> int | None:
        """Return how the first start has ended."""
        return self.exit_codes[0][0]


def test_a_fault_that_was_told_named_and_survived_passes() -> None:
    scored = score(SCENARIO, Traces(events=[NAMED]), Traces())
    assert (scored.detected_step, scored.culprit_named, scored.recovered, scored.passed) == (83, True, True, True)
    assert scored.told == scored.named == "warning: block_2 is broken"


@pytest.mark.parametrize(
    ("changed", "detected", "named"),
    [
        pytest.param({"text": "block_3 is broken"}, 83, False, id="another layer"),
        pytest.param({"text": "block_2 is fine"}, None, True, id="another fault"),
        pytest.param({"step": 79}, None, False, id="before the fault"),
        pytest.param({"kind": "note"}, None, False, id="no warning"),
    ],
)
def test_what_tells_of_something_else_does_not_count(
    changed: dict[str, Any], detected: int | None, named: bool
) -> None:
    scored = score(SCENARIO, Traces(events=[NAMED | changed]), Traces())
    assert (scored.detected_step, scored.culprit_named, scored.passed) == (detected, named, False)


@pytest.mark.parametrize(
    ("traces", "recovered"),
    [
        pytest.param(Traces(final_loss=2.019), True, id="within 1%"),
        pytest.param(Traces(final_loss=2.021), False, id="worse by more than 1%"),
        pytest.param(Traces(final_loss=1.979), False, id="better by more than 1%, which is another run"),
        pytest.param(Traces(final_loss=None), False, id="not at its end"),
        pytest.param(Traces(exit_codes=[[3, 3], [0, 0]]), False, id="only when it was started again"),
    ],
)
def test_recovered_is_a_run_that_ends_by_itself_near_the_clean_loss(traces: Traces, recovered: bool) -> None:
    assert score(SCENARIO, traces, Traces()).recovered is recovered


def test_a_run_that_is_resumed_has_to_end_with_the_code_of_its_fault() -> None:
    scenario = replace(SCENARIO, recovery="by a resume", exit_codes=(4,))
    assert score(scenario, Traces(exit_codes=[[4, 4], [0, 0]]), Traces()).recovered
    assert not score(scenario, Traces(exit_codes=[[1, 1], [0, 0]]), Traces()).recovered


def test_a_printed_line_is_of_the_step_that_was_not_taken() -> None:
    rows = [{"step": step} for step in range(1, 121)]
    scenario = replace(SCENARIO, detects="the run hangs", names="stuck: rank 1 ")
    traces = Traces(rows=rows, output="x\nthe run hangs: no progress\nstuck: rank 1 (stage 1)\n")
    scored = score(scenario, traces, Traces())
    assert (scored.detected_step, scored.culprit_named) == (80, True)
    of_file = score(replace(scenario, injected_step=0, recovery="by the user"), traces, Traces())
    assert (of_file.detected_step, of_file.recovered) == (0, None)


def test_an_alarm_in_a_clean_run_is_listed() -> None:
    quiet = {**NAMED, "kind": "ramp"}
    assert false_alarms(Traces(events=[quiet], output="saved x\n")) == []
    output = "review: warning optimizer.params.lr: too high\n"
    assert len(false_alarms(Traces(events=[NAMED, quiet], output=output))) == 2


def test_every_scenario_has_a_name_of_its_own_and_there_are_ten_clean_runs() -> None:
    assert len(SCENARIOS) == sum(len(group.SCENARIOS) for group in GROUPS) >= 21
    assert len({run.seed for run in CLEAN_RUNS}) == len(CLEAN_RUNS) == 10


def test_the_rule_of_olmo_core_is_6_deviations_over_the_mean_once_64_steps_are_known() -> None:
    before = [1.0, 3.0] * 32  # mean 2, deviation 1.008
    assert not stands_out(8.0, before) and stands_out(8.1, before)
    assert not stands_out(1e9, before[:62]) and stands_out(1e9, before[:63])
    # What is not finite poisons the statistics: all is skipped until it is forgotten.
    assert stands_out(2.0, [*before, float("inf")]) and stands_out(float("nan"), before)


def test_the_tables_have_a_row_each_and_hide_no_miss() -> None:
    row: dict[str, Any] = {
        "fault": "a fault", "injected_step": 80, "detected_step": None, "culprit_named": False, "recovered": False,
        "final_loss": None, "clean_final_loss": 2.0, "compared": True, "unguarded_final_loss": 3.0,
        "skip_step_final_loss": None, "passed": False,
    }  # fmt: skip
    text = markdown([row, {**row, "detected_step": 83, "culprit_named": True, "recovered": True, "passed": True}])
    assert "| a fault | 80 | **no** | **not named** | **no** | ended before | 2.0000 | 3.0000 | ended before |" in text
    assert "3 steps later" in text and "1 of 2 scenarios" in text
    clean = clean_markdown([{"name": "fp32", "steps": 300, "final_loss": 2.0, "false_alarms": ["step 3 spike: x"]}])
    assert "1 false alarms in 1 clean runs" in clean and "step 3 spike" in clean
