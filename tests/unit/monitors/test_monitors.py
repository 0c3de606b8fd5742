"""Monitors: what each says and when, that nothing of any is lost on a resume, and that one more is welcome."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.core.batch_rampup import Batch
from megastable.core.errors import UserError
from megastable.core.records import Event, StepResult, TrainingState, Watched
from megastable.core.robust import RollingDeviation
from megastable.monitors import MONITORS, Monitors
from megastable.monitors.monitor import STOP, Seen
from megastable.planning.run_plan import RunPlan
from tests.support.tiny_run import tiny_run
from tests.support.toy_monitor import METRIC, LearningRateProgress, planned_learning_rates

quick = settings(max_examples=25, deadline=None)  # no deadline: the machine may be busy
FP16: dict[str, Any] = {"fp16": {"enabled": True, "min_loss_scale": 2}}
EXPECTED_FIRST_LOSS = math.log(300)
LEARNING_RATE = 0.004


def watched(headroom: float = 0.01, layers: dict[str, dict[str, float]] | None = None) -> Watched:
    layers = layers or {"block_0": {"max_activation": 655.04, "max_attention_logit": 3.0}}
    return Watched(layers, headroom, next(iter(layers)), 0, 0.5, {"stage_0": 0.5}, 1.0, None, (0.5,) * 4, (1.0,) * 4)


def seen(step: int, batch_size: int = 4, **result: Any) -> Seen:
    values: dict[str, Any] = {"loss": 5.7, "grad_norm": 1.0, "loss_scale": 1.0, "skipped": False, "step_seconds": 1.0}
    if result.get("skipped"):
        values["grad_norm"] = math.inf
    values |= result
    state = TrainingState(step=step, consumed_samples=4 * step)
    return Seen(state, Batch(batch_size, 1, batch_size), LEARNING_RATE, StepResult(**values))


def plan_of(world_size: int = 1, **changes: Any) -> RunPlan:
    """Plan the tiny run with changes."""
    return RunPlan.of(tiny_run(**changes), world_size)


def monitors_of(**changes: Any) -> Monitors:
    """Make the monitors of the tiny run with changes."""
    return Monitors(plan_of(**changes))


def kinds(events: list[Event]) -> list[str]:
    return [event.kind for event in events]


@st.composite
def steps(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Draw steps with skips at falling scales, spikes, watched layers and a growing batch."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    found, batch = [], 4
    for _ in range(draw(st.integers(2, 30))):
        skipped = rng.random() < 0.4
        batch += 4 * (rng.random() < 0.2)
        found.append(
            {
                "batch_size": batch,
                "skipped": skipped,
                "loss": math.nan if skipped else rng.uniform(2, 6),
                "loss_scale": rng.choice([2.0, 4.0]),
                "watched": watched(rng.random()) if rng.random() < 0.5 else None,
            }
        )
    return found


@quick
@given(steps=steps(), cut=st.integers(0, 30))
def test_a_resumed_monitor_says_what_an_uninterrupted_one_says(steps: list[dict[str, Any]], cut: int) -> None:
    plan = plan_of(**FP16, megastable__monitors__max_skips_at_min_scale=3)
    whole, first = Monitors(plan), Monitors(plan)
    for number, step in enumerate(steps, start=1):
        if number == cut % len(steps) + 1:
            state = json.loads(json.dumps(first.state_dict()))
            first = Monitors(plan)
            first.load_state_dict(state)
        assert first.observe(seen(number, **step)) == whole.observe(seen(number, **step))
        assert first.values() == whole.values()
        assert first.should_watch_next_step == whole.should_watch_next_step == step["skipped"]


@pytest.mark.parametrize("is_same_text", [True, False])
def test_what_a_checkpoint_says_nothing_of_is_forgotten(is_same_text: bool) -> None:
    """Also where it is gone back to within a run: what came after it is not its memory."""
    monitors = monitors_of()
    fresh = monitors.state_dict()
    for number in range(1, 20):
        monitors.observe(seen(number))
    known = {} if is_same_text else monitors.state_dict()
    assert monitors.state_dict() != fresh
    monitors.load_state_dict(known, is_same_text)
    of_the_text = [name for name, kind in MONITORS.items() if kind.is_of_the_text]
    for name in fresh if is_same_text else of_the_text:
        assert monitors.state_dict()[name] == fresh[name]


def test_the_registry_is_documented_and_a_checkpoint_without_a_monitor_is_no_fault() -> None:
    assert all(kind.__doc__ for kind in MONITORS.values())
    monitors = monitors_of()
    assert monitors.state_dict().keys() == MONITORS.keys()
    monitors.load_state_dict({})


@pytest.mark.parametrize(("share", "warns"), [(0.91, False), (1.09, False), (0.89, True), (1.11, True)])
def test_a_first_loss_off_by_a_tenth_is_a_warning(share: float, warns: bool) -> None:
    events = monitors_of().observe(seen(1, loss=share * EXPECTED_FIRST_LOSS))
    assert kinds(events) == (["warning"] if warns else ["first_loss"])
    assert kinds(monitors_of().observe(seen(2, loss=share * EXPECTED_FIRST_LOSS))) == []


def test_the_first_loss_of_an_imported_model_is_not_that_of_fresh_weights() -> None:
    monitors = monitors_of()
    monitors.load_state_dict({"first_loss": {"weights_are_fresh": False}})
    assert kinds(monitors.observe(seen(1, loss=0.5 * EXPECTED_FIRST_LOSS))) == []
    assert monitors.state_dict()["first_loss"] == {"weights_are_fresh": False}


def test_a_first_loss_that_is_no_number_is_a_warning() -> None:
    assert kinds(monitors_of().observe(seen(1, loss=math.nan))) == ["warning"]


def test_a_step_of_the_ramp_is_an_event_once() -> None:
    monitors = monitors_of()
    events = [kinds(monitors.observe(seen(step, batch_size=size))) for step, size in enumerate((4, 4, 8, 8), start=2)]
    assert events == [[], [], ["ramp"], []]


@pytest.mark.parametrize(("headroom", "warns"), [(0.24, False), (0.25, True), (math.inf, True)])
def test_little_headroom_is_a_warning_that_names_the_layer(headroom: float, warns: bool) -> None:
    layers = {"block_3": {"max_activation": 9.0, "max_attention_logit": 65504 * headroom}}
    events = monitors_of(**FP16).observe(seen(2, watched=watched(headroom, layers)))
    assert kinds(events) == (["warning"] if warns else [])
    if warns:
        assert "max_attention_logit of block_3" in events[0].text and "fp16" in events[0].text
        # What has left the format will not do so "soon", by a share of infinitely many percent.
        assert ("may overflow soon" in events[0].text) == math.isfinite(headroom)
        assert "inf%" not in events[0].text


@pytest.mark.parametrize("number_format", ["fp16", "bf16", "fp32"])
def test_bf16_is_advised_to_fp16_alone(number_format: str) -> None:
    formats = {} if number_format == "fp32" else {number_format: {"enabled": True}}
    monitors = monitors_of(megastable__monitors__max_skips_at_min_scale=1, **formats)
    (stop,) = [event for event in monitors.observe(seen(2, skipped=True)) if event.kind == STOP]
    assert ("take that instead of fp16" in stop.text) == (number_format == "fp16")


def skips(scales: list[float | None], **changes: Any) -> list[str]:
    """Return the kinds of events of steps at these loss scales; None is a step that is not skipped."""
    monitors = monitors_of(megastable__monitors__max_skips_at_min_scale=3, **changes)
    found = []
    for step, scale in enumerate(scales, start=2):
        found += monitors.observe(seen(step, skipped=scale is not None, loss_scale=scale or 2.0))
    return kinds(found)


def test_only_skips_that_no_scale_can_end_stop_a_run() -> None:
    assert skips([16, 8, 4, 2, 2], **FP16) == ["overflow"] * 5, "the scale fell meanwhile"
    assert skips([4, 2, 2, 2], **FP16) == ["overflow"] * 4 + [STOP]
    assert skips([2, 2, None, 2, 2], **FP16) == ["overflow"] * 4, "a good step in between"
    assert skips([128, 128, 128], fp16={"enabled": True, "loss_scale": 128}) == ["overflow"] * 3 + [STOP]
    assert skips([1, 1, 1], bf16={"enabled": True}) == ["skip"] * 3 + [STOP]


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"max_activation": math.inf, "max_attention_logit": 3.0}, "max_activation of block_0"),
        ({"max_activation": math.inf, "max_attention_logit": math.inf}, "max_attention_logit of block_0"),
        ({"max_activation": 655.04, "max_attention_logit": 3.0}, "on their way back"),
    ],
)
def test_the_diagnosis_says_where_it_went_wrong(values: dict[str, float], says: str) -> None:
    monitors = monitors_of(megastable__monitors__max_skips_at_min_scale=1, **FP16)
    layers = {"embedding": {"max_activation": 1.0}, "block_0": values, "head": {"max_activation": math.inf}}
    if not math.isinf(values["max_activation"]):
        del layers["head"]
    events = monitors.observe(seen(5, skipped=True, loss_scale=2.0, watched=watched(0.01, layers)))
    (stop,) = [event for event in events if event.kind == STOP]
    assert says in stop.text and "fp16.min_loss_scale = 2" in stop.text
    assert "step 5" in stop.text and "(stage 0 of 1)" in stop.text


@pytest.mark.parametrize(("layer", "stage"), [("embedding", 0), ("block_1", 0), ("block_2", 1), ("head", 1)])
def test_the_diagnosis_names_the_stage_of_the_layer(layer: str, stage: int) -> None:
    two_stages = {"megastable__pipeline__num_stages": 2, "megastable__pipeline__partition": [2, 2]}
    monitors = Monitors(plan_of(2, **two_stages, megastable__monitors__max_skips_at_min_scale=1))
    layers = {"embedding": {"max_activation": 1.0}, layer: {"max_activation": math.inf}}
    events = monitors.observe(seen(7, skipped=True, watched=watched(math.inf, layers)))
    (stop,) = [event for event in events if event.kind == STOP]
    assert f"{layer} (stage {stage} of 2)" in stop.text and "step 7" in stop.text


@pytest.mark.parametrize("changes", [{}, {"bf16": {"enabled": True}}, FP16], ids=["fp32", "bf16", "fp16"])
def test_a_loss_that_alone_is_not_finite_is_a_skip_with_words_of_its_own(changes: dict[str, Any]) -> None:
    monitors = monitors_of(megastable__monitors__max_skips_at_min_scale=2, **changes)
    bad: dict[str, Any] = {"skipped": True, "grad_norm": 0.5, "loss": math.inf, "loss_scale": 1024.0}
    (skip,) = monitors.observe(seen(5, **bad))
    assert (skip.kind, skip.text) == (
        "skip",
        "the loss was not finite, though every gradient was: the step was skipped",
    )
    stop = monitors.observe(seen(6, **bad))[-1]
    assert stop.kind == STOP, "a lower loss scale cannot end these skips, however much it may fall"
    assert "the loss was not finite" in stop.text and "step 6" in stop.text and "scale" not in stop.text


@quick
@given(st.lists(st.floats(0.1, 10), min_size=3, max_size=40), st.floats(-0.01, 0.01))
def test_volatility_takes_no_notice_of_a_trend_or_of_one_spike(noise: list[float], slope: float) -> None:
    def deviation(values: list[float]) -> float:
        rolling = RollingDeviation(64)
        for value in values:
            rolling.add(value)
        assert rolling.deviation is not None
        return rolling.deviation

    trend = [slope * number for number in range(50)]
    assert deviation(trend) == pytest.approx(0.741 * math.sqrt(2) * abs(slope), rel=1e-2, abs=1e-12)
    spiked = [*trend[:20], 1e6, *trend[20:]]
    assert deviation(spiked) == pytest.approx(deviation(trend), rel=1e-2, abs=1e-12)
    shifted = [value + 5 for value in noise]
    assert deviation(shifted) == pytest.approx(deviation(noise), abs=1e-9)


def test_volatility_is_the_standard_deviation_of_plain_noise() -> None:
    rng = random.Random(4)
    rolling = RollingDeviation(20_000)
    for _ in range(20_000):
        rolling.add(rng.gauss(3.0, 0.5))
    assert rolling.deviation == pytest.approx(0.5, rel=0.03)


@pytest.mark.parametrize(("slowest", "warns"), [(1.0, False), (3.0, False), (9.0, True)])
def test_the_balance_of_the_stages_is_reported_once_and_warned_of_where_it_is_far_off(
    slowest: float, warns: bool
) -> None:
    plan = plan_of(2, megastable__pipeline__num_stages=2, megastable__pipeline__partition=[2, 2])
    look = replace(watched(), stage_busy_seconds={"stage_0": 1.0, "stage_1": slowest})
    monitors = Monitors(plan)
    first = seen(1, watched=look, loss=EXPECTED_FIRST_LOSS)
    assert kinds(monitors.observe(first)) == ["first_loss"], "everything warms up"
    assert kinds(monitors.observe(seen(2))) == []
    events = monitors.observe(seen(3, watched=look))
    assert kinds(events) == (["stage_balance", "warning"] if warns else ["stage_balance"])
    assert events[0].data["measured"] == pytest.approx(2 * slowest / (1 + slowest) - 1)
    assert events[0].data["predicted"] == plan.cut.imbalance
    assert 0 < plan.cut.imbalance < 1
    resumed = Monitors(plan)
    resumed.load_state_dict(json.loads(json.dumps(monitors.state_dict())))
    resumed.observe(seen(4))  # everything is warm again
    for reported in (monitors, resumed):
        assert kinds(reported.observe(seen(5, watched=look))) == []


def test_one_stage_has_no_balance() -> None:
    assert kinds(monitors_of().observe(seen(2, watched=watched()))) == []


def test_checkpoints_with_the_older_names_of_a_state_still_load() -> None:
    plan = plan_of(2, megastable__pipeline__num_stages=2, megastable__monitors__max_skips_at_min_scale=3)
    monitors = Monitors(plan)
    monitors.load_state_dict({"skipped_steps": {"hopeless": 2, "wants_a_look": True}, "stage_balance": {"told": True}})
    assert monitors.should_watch_next_step
    state = monitors.state_dict()
    assert state["skipped_steps"] == {"consecutive_skips": 2, "should_watch_next_step": True}
    assert state["stage_balance"] == {"reported": True}
    assert kinds(monitors.observe(seen(5, skipped=True))) == ["skip", STOP]
    monitors.load_state_dict({"stage_balance": {"told": False}})
    assert monitors.state_dict()["stage_balance"] == {"reported": False}


# A monitor that is added


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add one line to the registry."""
    monkeypatch.setitem(MONITORS, "toy", LearningRateProgress)


@pytest.mark.usefixtures("toy")
def test_a_new_monitor_measures_what_it_sees_of_the_learning_rate_and_the_plan() -> None:
    plan = plan_of()
    total = sum(planned_learning_rates(plan))
    monitors = Monitors(plan)
    for step in (1, 2, 3):
        monitors.observe(seen(step))
        assert monitors.values()[METRIC] == pytest.approx(step * LEARNING_RATE / total)
    assert "loss_volatility" in monitors.values()

    state = json.loads(json.dumps(monitors.state_dict()))
    assert state["toy"] == {"used": pytest.approx(3 * LEARNING_RATE), "planned": pytest.approx(total)}
    resumed = Monitors(plan)
    resumed.load_state_dict(state)
    for resumed_or_not in (monitors, resumed):
        resumed_or_not.observe(seen(4))
        assert resumed_or_not.values()[METRIC] == pytest.approx(4 * LEARNING_RATE / total)


class NamedLikeTwoOthers(LearningRateProgress):
    """Has the name of a step's metric and that of another monitor's."""

    metric_names = ("lr", "loss_volatility")


def test_a_name_in_use_is_refused_at_the_start_and_every_clash_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MONITORS, "toy", NamedLikeTwoOthers)
    with pytest.raises(UserError) as caught:
        Monitors(plan_of(), step_metrics=("loss", "lr"))
    text = str(caught.value)
    assert "lr, measured by the monitor toy, is a metric of the step itself" in text
    assert "loss_volatility, measured by the monitor toy, is a metric of the monitor loss_volatility" in text


class MeasuresMoreThanItLists(LearningRateProgress):
    """Has a number whose name nobody could compare with the others."""

    metric_names = ()


def test_a_number_that_is_not_listed_is_an_error_that_names_the_monitor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MONITORS, "toy", MeasuresMoreThanItLists)
    monitors = monitors_of()
    monitors.observe(seen(1))
    with pytest.raises(ValueError, match=f"monitor toy measures {METRIC}, which its metric_names do not list"):
        monitors.values()


def test_monitors_need_no_torch() -> None:
    script = "import sys; sys.modules['torch'] = None\nfrom megastable.monitors import Monitors, training_status"
    repository = Path(__file__).parents[3]
    finished = subprocess.run(
        [sys.executable, "-c", script], cwd=repository, capture_output=True, text=True, timeout=60
    )
    assert finished.returncode == 0, finished.stderr


@quick
@given(samples=st.integers(1, 50), sizes=st.lists(st.integers(1, 60), min_size=1, max_size=30))
def test_the_end_of_every_epoch_is_an_event_and_the_epoch_a_metric(samples: int, sizes: list[int]) -> None:
    monitors = monitors_of()
    state = TrainingState()
    completed = 0
    for size in sizes:
        result = StepResult(loss=5.7, grad_norm=1.0, loss_scale=1.0, skipped=False, step_seconds=1.0)
        state = state.advance(Batch(size, 1, size), result, 16)
        epochs = [
            event
            for event in monitors.observe(Seen(state, Batch(size, 1, size), LEARNING_RATE, result, samples))
            if event.kind == "epoch"
        ]
        assert monitors.values()["epoch"] == state.consumed_samples / samples
        now = state.consumed_samples // samples
        assert len(epochs) == (now > completed)
        for event in epochs:
            assert event.data == {"completed": now, "samples_of_next": state.consumed_samples % samples}
        completed = now


def test_an_epoch_that_ends_among_samples_that_are_left_out_is_told_once() -> None:
    monitors = monitors_of()
    result = StepResult(loss=5.7, grad_norm=1.0, loss_scale=1.0, skipped=False, step_seconds=1.0)
    state = TrainingState().advance(Batch(4, 1, 4), result, 16)
    told = []
    for left_out in (0, 6, 0, 0):  # of 12 samples: the steps end at positions 8, 18, 22 and 26
        state = state.advance(Batch(4, 1, 4), result, 16, left_out)
        events = monitors.observe(Seen(state, Batch(4, 1, 4), LEARNING_RATE, result, 12))
        told += [(event.step, event.data["completed"], event.text) for event in events if event.kind == "epoch"]
        monitors.load_state_dict(monitors.state_dict())
    assert [(step, completed) for step, completed, _ in told] == [(3, 1), (5, 2)]
    assert "but for 6 that were left out" in told[0][2]


def test_where_the_data_are_not_known_there_is_no_epoch() -> None:
    monitors = monitors_of()
    assert "epoch" not in kinds(monitors.observe(seen(1)))
    assert "epoch" not in monitors.values()
