"""The plan of a run that continues a checkpoint: from any place, with any change of batch, ramp and length since."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.config import ConfigError, RunConfig, run_from_dict
from megastable.config.run_config import run_as_dict
from megastable.core.batch_rampup import Batch
from megastable.core.errors import UserError
from megastable.core.lr_schedule import LR_SCHEDULES
from megastable.core.records import FRESH, StepResult, TrainingState
from megastable.planning.run_plan import RunPlan
from tests.support.tiny_run import run_dict, tiny_run
from tests.unit.planning.test_learning_rates import DECAYING, MAX_LR, MIN_LR, runs_with

quick = settings(max_examples=25, deadline=None)  # no deadline: the machine may be busy

Taken = tuple[TrainingState, Batch, float]
"""The state before a step, its batch and its learning rate."""


def steps_taken(plan: RunPlan, state: TrainingState, skipped: frozenset[int] = frozenset()) -> list[Taken]:
    """Take the steps that are left as the loop does, and return them."""
    taken = []
    while state.step < plan.length.total_steps:
        batch = plan.ramp.at(state.consumed_samples)
        taken.append((state, batch, plan.learning_rate(state.applied_samples, batch)))
        result = StepResult(1.0, 1.0, 1.0, state.step in skipped, 1.0)
        state = state.advance(batch, result, plan.run.megastable.model.seq_length)
    return taken


def plan_left(run: RunConfig, world_size: int, state: TrainingState) -> RunPlan | None:
    """Plan what is left on the world; None where it is refused for its batches or nothing is left."""
    if not run.megastable.training.goes_on(state.step, state.consumed_samples):
        return None
    try:
        return RunPlan.of(run, world_size, state)
    except UserError as error:
        assert "is not a multiple of micro-batch size" in str(error)
        return None


def state_after(plan: RunPlan, num_steps: int) -> TrainingState:
    """Return where a run without skips stands after some of its steps, not the last."""
    starts = [state for state, _, _ in steps_taken(plan, FRESH)]
    return starts[min(num_steps, len(starts) - 1)]


@pytest.mark.parametrize("name", sorted(LR_SCHEDULES))
@quick
@given(data=st.data())
def test_a_run_that_was_changed_ends_where_and_as_it_is_planned(name: str, data: st.DataObject) -> None:
    state = state_after(RunPlan.of(tiny_run(**data.draw(runs_with("constant"))), 1), data.draw(st.integers(0, 60)))
    changed = data.draw(runs_with(name))
    run = tiny_run(**changed, train_micro_batch_size_per_gpu=data.draw(st.integers(1, 3)))
    world_size = data.draw(st.integers(1, 3))
    plan = plan_left(run, world_size, state)
    if plan is None:
        return
    taken = steps_taken(plan, state)
    last, batch, rate = taken[-1]
    training = run.megastable.training
    assert plan.length.total_steps == last.step + 1
    assert plan.length.total_samples == last.consumed_samples + batch.global_batch_size
    assert plan.length.last_step_start == last.consumed_samples
    if training.total_steps is not None:
        assert plan.length.total_steps == training.total_steps
    else:
        assert last.consumed_samples < (training.total_samples or 0) <= plan.length.total_samples
    assert rate == (MIN_LR if name in DECAYING else MAX_LR)
    for _, step_batch, _ in taken:
        product = step_batch.micro_batch_size * step_batch.num_microbatches * world_size
        assert product == step_batch.global_batch_size > 0
    assert {step_batch for _, step_batch, _ in taken} == {phase.batch for phase in plan.phases}


@pytest.mark.parametrize("name", sorted(LR_SCHEDULES))
@quick
@given(data=st.data())
def test_a_run_that_was_not_changed_goes_on_as_if_it_had_not_stopped(name: str, data: st.DataObject) -> None:
    """With skipped steps before and after it, too, which move the learning rate's clock alone."""
    whole = RunPlan.of(tiny_run(**data.draw(runs_with(name))), 1)
    skipped = data.draw(st.frozensets(st.integers(0, 60), max_size=5))
    taken = steps_taken(whole, FRESH, skipped)
    done = data.draw(st.integers(0, len(taken) - 1))
    state = taken[done][0]
    plan = RunPlan.of(whole.run, 1, state)
    assert plan.length == whole.length
    assert plan.lr_schedule == whole.lr_schedule
    assert steps_taken(plan, state, skipped) == taken[done:]


@quick
@given(data=st.data(), micro_batch_size=st.integers(1, 4), world_size=st.integers(1, 4))
def test_a_run_file_is_refused_where_a_batch_that_is_left_does_not_divide(
    data: st.DataObject, micro_batch_size: int, world_size: int
) -> None:
    """As the plan refuses it, which comes later; batches that are done play no part."""
    state = TrainingState(step=data.draw(st.integers(0, 50)), consumed_samples=data.draw(st.integers(0, 400)))
    values = run_dict(**data.draw(runs_with("constant")), train_micro_batch_size_per_gpu=micro_batch_size)
    run = run_from_dict(values)
    if not run.megastable.training.goes_on(state.step, state.consumed_samples):
        run_from_dict(values, world_size=world_size, state=state)
        return
    try:
        run_from_dict(values, world_size=world_size, state=state)
    except ConfigError:
        assert plan_left(run, world_size, state) is None
    else:
        assert plan_left(run, world_size, state) is not None


def test_another_batch_reaches_the_samples_and_the_last_learning_rate() -> None:
    """Planned from sample 0, 48 samples in batches of 8 are six steps: four are done, and it would end at sample 32."""
    schedule: dict[str, Any] = {"type": "cosine", "warmup": 8, "min_lr": MIN_LR}
    changes = {"megastable__training": {"total_samples": 48}, "megastable__lr_schedule": schedule}
    before = RunPlan.of(tiny_run(megastable__batch_rampup={"final": 4}, **changes), 1)
    plan = RunPlan.of(tiny_run(megastable__batch_rampup={"final": 8}, **changes), 1, state_after(before, 4))
    taken = steps_taken(plan, state_after(before, 4))
    assert [state.consumed_samples for state, _, _ in taken] == [16, 24, 32, 40]
    assert (plan.length.total_steps, plan.length.total_samples) == (8, 48)
    assert taken[-1][2] == MIN_LR


def test_a_layout_that_divides_only_the_batches_that_are_left_is_taken() -> None:
    """The ramp of the tiny run has 4, 8 and 12 samples; 3 replicas divide the last."""
    run = tiny_run()
    state = state_after(RunPlan.of(run, 1), 6)
    assert RunPlan.of(run, 1).ramp.at(state.consumed_samples).global_batch_size == 12
    assert [phase.batch for phase in RunPlan.of(run, 3, state).phases] == [Batch(12, 1, 4)]
    run_from_dict(run_as_dict(run), world_size=3, state=state)
    with pytest.raises(UserError, match="global batch 4 "):
        run_from_dict(run_as_dict(run), world_size=3)
