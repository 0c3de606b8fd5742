"""Ranks that are slow or leak: who is named, when, and what is usual."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.monitors.monitor import Monitor, Seen
from megastable.monitors.ranks import GROWN_LOOKS, SLOW_LOOKS, MemoryGrowth, SlowRanks
from tests.unit.monitors.looks import look, plan_of

quick = settings(max_examples=25, deadline=None)  # no deadline: the machine may be busy
RANKS = 4
STAGES = {"megastable__pipeline": {"num_stages": 2}}


def texts(monitor: Monitor, looks: list[Seen]) -> list[str]:
    return [event.text for each in looks for event in monitor.observe(each)]


def busy(slow: int | None, draw: random.Random) -> tuple[float, ...]:
    """Draw the times of four ranks, of which one may take three times as long."""
    return tuple((3.0 if rank == slow else 1.0) * draw.uniform(0.85, 1.15) for rank in range(RANKS))


@quick
@given(rank=st.integers(0, RANKS - 1), seed=st.integers(0, 2**32))
def test_a_slow_rank_is_named_once(rank: int, seed: int) -> None:
    draw = random.Random(seed)
    monitor = SlowRanks(plan_of(RANKS, **STAGES))
    assert not texts(monitor, [look(busy=busy(None, draw)) for _ in range(10)])
    told = texts(monitor, [look(busy=busy(rank, draw)) for _ in range(10)])
    assert len(told) == 1 and told[0].startswith(f"rank {rank} (stage ")


@quick
@given(seed=st.integers(0, 2**32))
def test_a_rank_that_is_slow_now_and_then_is_not_told_of(seed: int) -> None:
    draw = random.Random(seed)
    looks = [look(busy=busy(1 if number % SLOW_LOOKS else None, draw)) for number in range(30)]
    assert not texts(SlowRanks(plan_of(RANKS, **STAGES)), looks)


def test_a_stage_with_more_to_compute_is_not_slow() -> None:
    """Peers are of the same stage: a last stage with a large head takes longer by design."""
    looks = [look(busy=(1.0, 1.0, 4.0, 4.0)) for _ in range(10)]
    assert not texts(SlowRanks(plan_of(RANKS, **STAGES)), looks)


@pytest.mark.parametrize("world_size", [1, 2, RANKS])
def test_equal_ranks_are_not_told_of(world_size: int) -> None:
    one_stage = {"megastable__pipeline": {"num_stages": 1}}
    assert not texts(SlowRanks(plan_of(world_size, **one_stage)), [look(busy=(1.0,) * world_size)] * 10)


@quick
@given(rank=st.integers(0, 1), mib=st.floats(10, 1000))
def test_a_rank_that_leaks_is_named_once(rank: int, mib: float) -> None:
    monitor = MemoryGrowth(plan_of(2, **STAGES))
    held = [0.4 + mib / 1024 * number for number in range(3 * GROWN_LOOKS)]
    looks = [look(memory=(gib, 0.4) if rank == 0 else (0.4, gib)) for gib in held]
    told = texts(monitor, looks)
    assert len(told) == 1 and told[0].startswith(f"rank {rank} (stage {rank}")


@pytest.mark.parametrize(
    "held",
    [
        pytest.param([0.3, 0.5, *[0.6] * 20], id="comes to its size"),
        pytest.param([0.4 + 1e-5 * number for number in range(40)], id="grows by next to nothing"),
        pytest.param([0.4 + 1e-4 * number + (number > 20) for number in range(40)], id="grows once"),
        pytest.param([0.4 + 0.1 * (number // 5) for number in range(20)], id="grows in steps, as with a ramp"),
    ],
)
def test_other_growth_is_not_told_of(held: list[float]) -> None:
    assert not texts(MemoryGrowth(plan_of(1)), [look(memory=(gib,)) for gib in held])
