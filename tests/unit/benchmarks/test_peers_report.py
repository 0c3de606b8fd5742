"""Tables of benchmarks/peers: ratios, medians and what stands where a candidate did not run."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
import report
from hypothesis import given, settings
from hypothesis import strategies as st

NAMES = (report.OWN, *report.ONE_F_ONE_B_PEERS, "torch ZBV", report.LIMIT)
step_seconds = st.floats(0.01, 10)
rounds_of_one_batch = st.lists(st.fixed_dictionaries({name: step_seconds for name in NAMES}), min_size=1, max_size=5)


def row(seconds: dict[str, float], num_micro_batches: int = 4) -> report.Row:
    """Build the row of one round, in which every candidate has the same loss."""
    return {
        "global_batch_size": 2 * num_micro_batches, "num_micro_batches": num_micro_batches,
        "seconds": seconds, "losses": dict.fromkeys(seconds, 7.0),
    }  # fmt: skip


def result(rows: list[report.Row], refused: dict[str, dict[int, str]] | None = None) -> dict[str, Any]:
    """Build the result file of a comparison."""
    hardware = {"cpu": "a processor", "cores": 2, "bf16": "", "load": 0.0, "torch": "2", "deepspeed": "0"}
    return {
        "date": "2026-01-01", "hardware": hardware, "settings": {"layers": 4}, "num_stages": 2,
        "bounds": {"megastable": [0, 4, 8]}, "refused": refused or {}, "rows": rows,
    }  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(rounds=rounds_of_one_batch)
def test_ratios_pair_the_steps_of_a_round(rounds: list[dict[str, float]]) -> None:
    rows = [row(seconds) for seconds in rounds]
    ratios = [seconds["torch 1F1B"] / seconds[report.OWN] for seconds in rounds]
    expected = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
    assert report.cell(rows, report.speed_over("torch 1F1B"), digits=2) == expected
    for seconds, one in zip(rounds, rows, strict=True):
        each = [report.speed_over(name)(one) for name in report.ONE_F_ONE_B_PEERS]
        assert report.speed_over_best(one) == pytest.approx(min(each))
        assert report.speed_over_best(row({**seconds, "torch ZBV": 0.001})) == report.speed_over_best(one)


@settings(max_examples=25, deadline=None)
@given(num_micro_batches=st.integers(1, 64), num_stages=st.integers(1, 8), seconds=step_seconds)
def test_a_step_that_waits_only_for_the_bubble_is_ideal(
    num_micro_batches: int, num_stages: int, seconds: float
) -> None:
    """p single-threaded stages of equal cost: a micro-batch takes each of them as long as it takes all p threads."""
    of_micro_batch = seconds / num_micro_batches
    slots = num_micro_batches + num_stages - 1
    assert report.ideal_seconds(seconds, num_micro_batches, num_stages) == pytest.approx(slots * of_micro_batch)
    one = row({report.LIMIT: seconds, "perfect": slots * of_micro_batch}, num_micro_batches)
    assert report.share_of_ideal("perfect", num_stages)(one) == pytest.approx(1.0)
    assert report.share_of_limit("perfect")(one) == pytest.approx(num_micro_batches / slots)


def test_a_refused_batch_leaves_its_cells_empty_and_tells_why() -> None:
    whole = {name: 1.0 for name in NAMES}
    without = {name: 1.0 for name in NAMES if name != "torch 1F1B"}
    rows = [row(without, 1), row(whole, 2)]
    rows[1]["losses"]["torch 1F1B"] = 70.0  # it missed a step
    text = report.markdown(result(rows, {"torch 1F1B": {2: "too few"}}))
    assert "- torch 1F1B at a global batch of 2: too few" in text
    assert "differ by 0.0e+00" in text
    small, large = ([line for line in text.splitlines() if line.startswith(f"| {size} | ")] for size in (2, 4))
    assert len(small) == len(large) == 4
    assert all(line.count("| - ") == 1 for line in small) and not any("| - " in line for line in large)


@pytest.mark.parametrize("left_out", NAMES)
def test_any_candidate_may_be_left_out(left_out: str) -> None:
    text = report.markdown(result([row({name: 1.0 for name in NAMES if name != left_out})]))
    assert ("Throughput of megastable" in text) == (left_out != report.OWN)
    assert ("Share of a perfect" in text) == (left_out != report.LIMIT)
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert not any(f"| {left_out} |" in line for line in tables) and not any("| - " in line for line in tables)


@settings(max_examples=25, deadline=None)
@given(each=st.floats(0.1, 10), fixed=st.floats(0.1, 10), counts=st.lists(st.integers(1, 64), min_size=2, unique=True))
def test_the_fixed_cost_is_what_micro_batches_do_not_explain(each: float, fixed: float, counts: list[int]) -> None:
    rows = [row(dict.fromkeys(NAMES, (m + 1) * each + fixed), m) for m in counts]
    lines = report.fixed_costs(rows, num_stages=2)
    assert f"| {report.OWN} | {fixed:.3f} | {each:.3f} |" in lines[5]
    assert len(lines) == 5 + 1 + len(report.ONE_F_ONE_B_PEERS)
    assert report.fixed_costs(rows[:1], num_stages=2) == []


def test_steps_that_do_not_grow_with_their_micro_batches_are_all_fixed_cost() -> None:
    rows = [row(dict.fromkeys(NAMES, seconds), count) for count, seconds in ((1, 0.3), (2, 0.2))]
    assert "| 0.000 | - |" in report.fixed_costs(rows, num_stages=2)[5]
