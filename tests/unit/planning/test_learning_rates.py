"""The learning rate of every step of a run: any schedule, any lengths in any unit, any ramp."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.config.lr_schedule import types_that_read
from megastable.core.batch_rampup import RunLength
from megastable.core.lr_schedule import BATCH_SCALING_EXPONENTS, LR_SCHEDULES, WarmupStableDecay
from megastable.planning.run_plan import RunPlan
from tests.support.tiny_run import TINY_RUN
from tests.unit.planning.plan_examples import plan_of, sample_of_step

quick = settings(max_examples=25, deadline=None)  # no deadline: the machine may be busy
DECAYING = types_that_read("min_lr")
# Only at its end does such a decay come to min_lr; a step may be there sooner.
SMOOTH = sorted(set(DECAYING) - {"step"})
MAX_LR, MIN_LR, SLACK = 0.01, 0.001, 1e-12
SEQ_LENGTH = TINY_RUN["megastable"]["model"]["seq_length"]
every_schedule = pytest.mark.parametrize("name", sorted(LR_SCHEDULES))
every_decay = pytest.mark.parametrize("name", DECAYING)


def lr_schedule(name: str, **keys: Any) -> dict[str, Any]:
    """Build the section of a run file, with ``min_lr`` where the type reads it."""
    return {"type": name, **({"min_lr": MIN_LR} if name in DECAYING else {}), **keys}


def learning_rates(plan: RunPlan) -> list[float]:
    """Compute the learning rate of every step of a run without skips, as the loop does."""
    rates, consumed = [], 0
    for _ in range(plan.length.total_steps):
        batch = plan.ramp.at(consumed)
        rates.append(plan.learning_rate(consumed, batch))
        consumed += batch.global_batch_size
    return rates


def test_which_schedules_have_a_minimum() -> None:
    assert set(LR_SCHEDULES) - set(DECAYING) == {"constant"}


# Known failure A1: a ramp must not stretch the schedule


def a1(**changes: Any) -> RunPlan:
    """Plan 100 steps, global batch 16, ramp from 8 by 8 over 160 samples, warmup a tenth of the run."""
    ramp = {"start": 8, "increment": 8, "final": 16, "ramp_samples": 160}
    return plan_of(
        megastable__batch_rampup=ramp,
        **{
            "megastable__training__total_steps": 100,
            "megastable__lr_schedule": lr_schedule("cosine", warmup={"fraction": 0.1}),
            **changes,
        },
    )


def test_a1_lengths_come_from_the_samples_really_consumed() -> None:
    assert a1().length == RunLength(total_steps=100, total_samples=1440, last_step_start=1424)


@every_decay
def test_a1_the_peak_is_at_the_warmups_end_and_the_last_step_at_the_minimum(name: str) -> None:
    plan = a1(megastable__lr_schedule=lr_schedule(name, warmup={"fraction": 0.1}))
    rates = learning_rates(plan)
    # A tenth of 1440 is sample 144, where step 18 begins; a tenth of 1600 would be step 20.
    assert rates.index(max(rates)) == 18
    assert rates[18] == pytest.approx(MAX_LR)
    assert rates[99] == pytest.approx(MIN_LR, abs=SLACK)
    assert min(rates[18:99]) > MIN_LR or name not in SMOOTH


# Any run


@st.composite
def ramped_runs(draw: st.DrawFn) -> dict[str, Any]:
    """Draw changes of the tiny run: a ramp of any form, a length in either unit and down to one step."""
    start, increment, n = draw(st.integers(1, 8)), draw(st.integers(1, 8)), draw(st.integers(1, 6))
    linear = {"start": start, "increment": increment, "final": start + n * increment}
    ramp: dict[str, Any] = draw(
        st.sampled_from(
            [
                {"final": start},
                {**linear, "ramp_samples": draw(st.integers(1, 500))},
                {**linear, "samples_per_increment": draw(st.integers(1, 100))},
                {"steps": [[0, start], [draw(st.integers(1, 300)), start + increment]]},
            ]
        )
    )
    length = draw(st.sampled_from(["total_samples", "total_steps"]))
    return {
        "megastable__batch_rampup": ramp,
        "megastable__training": {length: draw(st.integers(1, 30) | st.integers(1, 400))},
    }


def amounts(most_samples: int) -> st.SearchStrategy[Any]:
    """Draw an amount within the run in any unit, of any length, 0 included."""
    samples = st.integers(0, most_samples)
    return st.one_of(
        samples,
        st.builds(lambda whole, rest: {"tokens": whole * SEQ_LENGTH + rest}, samples, st.integers(0, SEQ_LENGTH - 1)),
        st.builds(lambda share: {"fraction": share}, st.floats(0, 1) | st.sampled_from([0.0, 0.05, 1.0])),
    )


@st.composite
def runs_with(draw: st.DrawFn, name: str) -> dict[str, Any]:
    """Draw such changes with a schedule ``name`` whose decay ends with the run, and with any other lengths."""
    changes = draw(ramped_runs())
    (length,) = changes["megastable__training"].values()  # in steps or samples: at most the samples of the run
    keys = {"warmup": draw(amounts(length))}
    if name in types_that_read("step_interval"):
        keys |= {"step_interval": draw(st.none() | amounts(length)), "step_factor": draw(st.none() | st.just(0.9))}
    return {**changes, "megastable__lr_schedule": lr_schedule(name, **keys)}


@every_schedule
@quick
@given(data=st.data())
def test_any_run_starts_at_the_first_value_and_ends_at_the_minimum(name: str, data: st.DataObject) -> None:
    plan = plan_of(**data.draw(runs_with(name)))
    rates = learning_rates(plan)
    assert rates[-1] == (MIN_LR if name in DECAYING else MAX_LR)
    if len(rates) > 1:
        assert rates[0] == (0.0 if plan.lr_schedule.warmup_samples else MAX_LR)


@every_schedule
@quick
@given(data=st.data())
def test_any_run_rises_while_it_warms_up_and_never_after(name: str, data: st.DataObject) -> None:
    plan = plan_of(**data.draw(runs_with(name)))
    rates, warmup = learning_rates(plan), plan.lr_schedule.warmup_samples
    for step, (rate, following) in enumerate(pairwise(rates)):
        assert 0 <= rate <= MAX_LR
        if sample_of_step(plan, step) < warmup:
            assert rate == pytest.approx(MAX_LR * sample_of_step(plan, step) / warmup)
        else:
            assert rate >= following - SLACK
            assert rate > MIN_LR or name not in SMOOTH


@every_schedule
@quick
@given(data=st.data(), samples=st.integers(0, 10**4))
def test_the_ramp_form_does_not_enter_the_schedule(name: str, data: st.DataObject, samples: int) -> None:
    """Samples are the clock: two runs of equal length and last step have one schedule, whatever their ramps."""
    changes = data.draw(runs_with(name))
    plan = plan_of(**changes)
    length = plan.length
    flat: dict[str, Any] = {"steps": [[0, 1], [length.last_step_start, length.total_samples - length.last_step_start]]}
    if length.last_step_start == 0:
        flat = {"final": length.total_samples}
    same = {
        **changes,
        "megastable__batch_rampup": flat,
        "megastable__training": {"total_samples": length.total_samples},
    }
    assert plan_of(**same).length.last_step_start == length.last_step_start
    assert plan_of(**same).lr_schedule == plan.lr_schedule


# Scaling with the batch


def ramp_of_three(**changes: Any) -> RunPlan:
    """Plan steps of 4, 8 and 16 samples, two of each, at a constant learning rate without warmup."""
    keys = {"warmup": 0, **changes.pop("keys", {})}
    return plan_of(
        megastable__batch_rampup={"steps": [[0, 4], [8, 8], [24, 16]]},
        megastable__training={"total_steps": changes.pop("total_steps", 6)},
        megastable__lr_schedule=lr_schedule(changes.pop("name", "constant"), **keys),
    )


@pytest.mark.parametrize(
    ("scaling", "shares"), [("none", (1, 1, 1)), ("sqrt", (0.5, 0.5**0.5, 1)), ("linear", (0.25, 0.5, 1))]
)
@pytest.mark.parametrize("total_steps", [6, 3])
def test_the_files_learning_rate_is_that_of_the_ramps_final_batch(
    scaling: str, shares: tuple[float, ...], total_steps: int
) -> None:
    """Also in a run that stops before it."""
    rates = learning_rates(ramp_of_three(total_steps=total_steps, keys={"batch_scaling": scaling}))
    assert rates == pytest.approx([MAX_LR * share for share in shares for _ in range(2)][:total_steps])


def test_a_batch_too_small_for_the_minimum_has_the_minimum() -> None:
    keys = {"batch_scaling": "linear", "min_lr": 0.004}
    assert learning_rates(ramp_of_three(name="linear", total_steps=2, keys=keys)) == [0.004, 0.004]


@every_schedule
@pytest.mark.parametrize("scaling", sorted(BATCH_SCALING_EXPONENTS))
@quick
@given(data=st.data())
def test_scaling_lowers_the_ramp_and_leaves_both_ends(name: str, scaling: str, data: st.DataObject) -> None:
    """The minimum is reached by a run that ends inside its ramp, too."""
    changes = data.draw(runs_with(name))
    unscaled = learning_rates(plan_of(**changes))
    changes["megastable__lr_schedule"]["batch_scaling"] = scaling
    plan = plan_of(**changes)
    rates, warmup, final = learning_rates(plan), plan.lr_schedule.warmup_samples, plan.ramp.schedule.final
    batches = [plan.ramp.at(sample_of_step(plan, step)).global_batch_size for step in range(len(rates))]
    assert all(rate <= other + SLACK for rate, other in zip(rates, unscaled, strict=True))
    assert [rate for rate, batch in zip(rates, batches, strict=True) if batch == final] == [
        rate for rate, batch in zip(unscaled, batches, strict=True) if batch == final
    ]
    if name in DECAYING:
        assert rates[-1] == MIN_LR
    for step in range(len(rates) - 1):
        warming = sample_of_step(plan, step + 1) < warmup
        if warming:
            assert rates[step] <= rates[step + 1] + SLACK
        elif sample_of_step(plan, step) >= warmup and batches[step] == batches[step + 1]:
            assert rates[step] >= rates[step + 1] - SLACK


# From the file to the schedule


@every_schedule
def test_every_schedule_can_be_named_in_the_file(name: str) -> None:
    assert type(plan_of(megastable__lr_schedule={"type": name}).lr_schedule) is LR_SCHEDULES[name]


def test_every_amount_in_every_unit() -> None:
    """The tiny run has 16 tokens a sample; 40 steps of 4 samples are 160."""
    for warmup, decay, other in [
        (16, 80, 64),
        ({"tokens": 256}, {"tokens": 1295}, {"tokens": 1030}),
        ({"fraction": 0.1}, {"fraction": 0.5}, {"fraction": 0.4}),
    ]:
        for name, key, field in [
            ("warmup_stable_decay", "stable", "stable_samples"),
            ("step", "step_interval", "step_interval_samples"),
        ]:
            schedule = plan_of(
                megastable__batch_rampup={"final": 4},
                megastable__training={"total_steps": 40},
                megastable__lr_schedule=lr_schedule(name, warmup=warmup, decay=decay, **{key: other}),
            ).lr_schedule
            seen = {f: getattr(schedule, f) for f in ("max_lr", "min_lr", "warmup_samples", "end_samples", field)}
            assert list(seen.values()) == [MAX_LR, MIN_LR, 16, 80, 64]


def test_defaults_of_the_schedules_with_keys_of_their_own() -> None:
    """100 steps of 10 samples: the warmup is 5% of the run, the last fifth decays, a level of steps is a tenth."""

    def default(name: str) -> Any:
        return plan_of(
            megastable__batch_rampup={"final": 10},
            megastable__training={"total_steps": 100},
            megastable__lr_schedule={"type": name},
        ).lr_schedule

    stable, step = default("warmup_stable_decay"), default("step")
    assert (stable.warmup_samples, stable.stable_samples, stable.end_samples) == (50, 800, 990)
    assert (step.warmup_samples, step.step_interval_samples, step.step_factor) == (50, 100, 0.5)


@quick
@given(warmup=st.floats(0, 1), more=st.floats(0, 1))
def test_the_default_constant_part_never_contradicts_the_other_lengths(warmup: float, more: float) -> None:
    decay = warmup + (1 - warmup) * more
    keys = {"warmup": {"fraction": warmup}, "decay": {"fraction": decay}}
    schedule = plan_of(megastable__lr_schedule=lr_schedule("warmup_stable_decay", **keys)).lr_schedule
    assert isinstance(schedule, WarmupStableDecay)
    assert schedule.stable_samples <= schedule.end_samples


@every_decay
def test_a_decay_given_in_samples_does_not_depend_on_where_the_run_stops(name: str) -> None:
    def rate(total_steps: int) -> float:
        keys = {"step_interval": 30} if name == "step" else {}
        plan = plan_of(
            megastable__batch_rampup={"final": 4},
            megastable__training={"total_steps": total_steps},
            megastable__lr_schedule=lr_schedule(name, warmup=8, decay=10_000, **keys),
        )
        return plan.lr_schedule.at(100)

    assert rate(total_steps=50) == rate(total_steps=5000)


def test_a_run_that_ends_before_its_warmup_does_stays_on_it() -> None:
    plan = plan_of(
        megastable__batch_rampup={"final": 4},
        megastable__training={"total_steps": 3},
        megastable__lr_schedule=lr_schedule("cosine", warmup=100),
    )
    assert learning_rates(plan) == pytest.approx([0.0, MAX_LR * 0.04, MAX_LR * 0.08])
