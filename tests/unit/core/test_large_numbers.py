"""What is computed from sizes takes no longer where the sizes are absurd; times are this process's own."""

import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megastable.core.batch_rampup import SHOWN_FAULTS, BatchDivisionError, BatchRampup, LinearRamp, StepRamp
from megastable.core.layout import divisors
from megastable.core.partition import least_largest_sum
from megastable.core.pipeline_cost import PassSeconds, pipeline_seconds

HUGE = 10**9


def division_of_huge_sizes() -> None:
    with pytest.raises(BatchDivisionError, match=r"nearest legal size is 1000000000$"):
        BatchRampup(StepRamp(((0, 8),)), HUGE, 1).phases(total_samples=8)
    ramp = BatchRampup(StepRamp(((0, HUGE + 1),)), 1, HUGE, ((2, 7), (3, HUGE)))
    with pytest.raises(BatchDivisionError, match=rf"nearest legal size is {HUGE**2}$"):
        ramp.phases(total_steps=1)


def cut_with_one_heavy_end() -> None:
    # The limit of the largest part is then no help in finding the cut.
    bounds = least_largest_sum([10**15] * 999 + [10**18], 333)
    assert len(bounds) == 334


def nearly_equal_stages() -> None:
    # The second stage is ahead of the first by so little a micro-batch that a million pass before it waits.
    passes = PassSeconds((1.5, 2.0, 1.0), (1.5, 0.9, 2.0 - 1e-7))
    assert pipeline_seconds(passes, HUGE) == pytest.approx(3 * (HUGE + 2), rel=1e-5)


@pytest.mark.parametrize("work", [division_of_huge_sizes, cut_with_one_heavy_end, nearly_equal_stages])
def test_it_ends_soon(work: Callable[[], None]) -> None:
    begin = time.process_time()
    work()
    assert time.process_time() - begin < 2


def test_a_long_list_of_sizes_that_do_not_divide_is_cut() -> None:
    with pytest.raises(BatchDivisionError) as caught:
        BatchRampup(LinearRamp(1, 2, 1001, 10**6), 2, 1).phases(total_samples=10**7)
    assert len(caught.value.faults) == SHOWN_FAULTS + 1
    assert caught.value.faults[-1] == f"and {501 - SHOWN_FAULTS} more sizes"


@given(number=st.integers(1, 5000))
def test_divisors(number: int) -> None:
    assert divisors(number) == [divisor for divisor in range(1, number + 1) if number % divisor == 0]
