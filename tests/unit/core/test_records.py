"""The training state: what a step moves, and what a skipped step leaves alone."""

from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.core.batch_rampup import Batch
from megastable.core.records import StepResult, TrainingState

quick = settings(max_examples=25, deadline=None)  # no deadline: the machine may be busy

BATCH = Batch(global_batch_size=24, micro_batch_size=2, num_microbatches=3)


def result(skipped: bool) -> StepResult:
    """Make a step's result; only ``skipped`` matters here."""
    return StepResult(loss=1.0, grad_norm=2.0, loss_scale=1.0, skipped=skipped, step_seconds=0.5)


def test_an_applied_step() -> None:
    state = TrainingState(step=4, consumed_samples=100, applied_samples=90, consumed_tokens=1000, skipped_steps=1)
    assert state.advance(BATCH, result(skipped=False), seq_length=10) == TrainingState(5, 124, 114, 1240, 1)


def test_a_skipped_step_moves_the_data_but_not_the_clock_of_the_learning_rate() -> None:
    state = TrainingState(step=4, consumed_samples=100, applied_samples=90, consumed_tokens=1000, skipped_steps=1)
    assert state.advance(BATCH, result(skipped=True), seq_length=10) == TrainingState(5, 124, 90, 1240, 2)


@quick
@given(st.lists(st.tuples(st.integers(1, 4096), st.booleans())), st.integers(1, 4096))
def test_counters_are_sums_over_the_steps(steps: list[tuple[int, bool]], seq_length: int) -> None:
    state = TrainingState()
    for size, skipped in steps:
        state = state.advance(Batch(size, 1, size), result(skipped), seq_length)
    assert state.step == len(steps)
    assert state.consumed_samples == sum(size for size, _ in steps)
    assert state.applied_samples == sum(size for size, skipped in steps if not skipped)
    assert state.consumed_tokens == seq_length * state.consumed_samples
    assert state.skipped_steps == sum(skipped for _, skipped in steps)


def test_counters_stay_whole_numbers() -> None:
    counts = TrainingState().advance(BATCH, result(skipped=True), seq_length=2, left_out_samples=3).to_dict()
    assert counts.pop("rollbacks") == ()
    assert {type(value) for value in counts.values()} == {int}
