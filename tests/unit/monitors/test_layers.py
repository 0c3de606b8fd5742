"""Layers over the looks: updates that jump, and attention logits that grow."""

from __future__ import annotations

import json
import math

import pytest

from megastable.core.records import Event
from megastable.monitors.layers import AttentionLogits, UpdateJumps
from megastable.monitors.monitor import Monitor, Seen
from tests.unit.monitors.looks import look, plan_of


def updates(jumping: float = 1.0, learning_rate: float = 0.004) -> Seen:
    """Return a look at two blocks, of which the second one's update is a multiple of the usual."""
    layers = {"block_0": {"update_ratio": learning_rate}, "block_1": {"update_ratio": jumping * learning_rate}}
    return look(layers, learning_rate=learning_rate)


def logits(first: float, second: float) -> Seen:
    return look({"block_0": {"max_attention_logit": first}, "block_1": {"max_attention_logit": second}})


def told(monitor: Monitor, *looks: Seen) -> list[Event]:
    return [event for each in looks for event in monitor.observe(each)]


@pytest.mark.parametrize(
    ("factor", "is_told"), [(1.0, False), (9.0, False), (11.0, True), (math.inf, True), (math.nan, True)]
)
def test_an_update_that_jumps_is_told_with_its_layer(factor: float, is_told: bool) -> None:
    monitor = UpdateJumps(plan_of())
    assert not told(monitor, *[updates() for _ in range(6)])
    events = told(monitor, updates(factor))
    assert [event.data["layer"] for event in events] == (["block_1"] if is_told else [])
    # Told once, also over a resume; and what stays so is what is usual.
    resumed = UpdateJumps(plan_of())
    resumed.load_state_dict(json.loads(json.dumps(monitor.state_dict())))
    assert not told(resumed, *[updates(factor)] * 20)


def test_updates_that_were_rounded_away_say_nothing_of_the_next_ones() -> None:
    monitor = UpdateJumps(plan_of())
    assert not told(monitor, *[updates(0.0)] * 8, *[updates()] * 8)
    assert not told(AttentionLogits(plan_of()), *[logits(1.0, 0.0)] * 8, logits(1.0, 80.0))


def test_updates_that_follow_the_learning_rate_do_not_jump() -> None:
    rates = [0.0, *(10.0**-power for power in range(6, 0, -1)), *(10.0**-power for power in range(1, 7))]
    assert not told(UpdateJumps(plan_of()), *[updates(learning_rate=rate) for rate in rates])


def test_the_first_looks_are_not_judged_and_a_resume_remembers_the_others() -> None:
    monitor = UpdateJumps(plan_of())
    assert not told(monitor, updates(), updates(), updates(), updates(100.0), updates())
    resumed = UpdateJumps(plan_of())
    resumed.load_state_dict(json.loads(json.dumps(monitor.state_dict())))
    assert [event.data["layer"] for event in told(resumed, updates(1000.0))] == ["block_1"]


def test_logits_that_have_doubled_and_are_large_are_told_once() -> None:
    monitor = AttentionLogits(plan_of())
    grown = [logits(3.0, 3.0 * 1.3**number) for number in range(14)]
    (event,) = told(monitor, *grown)
    assert event.data["layer"] == "block_1" and event.data["max_attention_logit"] >= 50
    resumed = AttentionLogits(plan_of())
    resumed.load_state_dict(json.loads(json.dumps(monitor.state_dict())))
    assert not told(resumed, grown[-1])


@pytest.mark.parametrize(
    "values",
    [
        pytest.param([1.0, 5.0, 20.0, 45.0], id="grow and stay small"),
        pytest.param([60.0] * 20, id="are large and stay so"),
        pytest.param([60.0 * 1.02**number for number in range(20)], id="grow slowly"),
        pytest.param([3.0, math.inf], id="are not finite, which others tell"),
    ],
)
def test_other_logits_are_not_told_of(values: list[float]) -> None:
    assert not told(AttentionLogits(plan_of()), *[logits(1.0, value) for value in values])
