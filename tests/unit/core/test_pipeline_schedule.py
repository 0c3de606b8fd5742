"""Schedules of every shape, for any costs and memory: what depends on what is kept, nobody waits in a circle."""

from __future__ import annotations

from collections import Counter, deque
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.core.errors import UserError
from megastable.core.pipeline_cost import PassSeconds, simulate
from megastable.core.pipeline_schedule import Pass, PassKind, PipelineSchedule, Placement, StageCosts
from megastable.core.schedule_lists import MemoryLimit
from megastable.core.schedule_shapes import SHAPES, fastest_schedule, schedule_of
from megastable.core.schedule_simulation import Timeline, most_held, play
from megastable.core.schedule_transfers import Row, Transfer, rows

quick = settings(max_examples=40, deadline=None)
seconds = st.floats(0.01, 10)
MEASURED = (1.0, 1.44, 0.71)
"""Forward pass and both halves of a backward pass, as measured on two stages."""


@st.composite
def costs_of(draw: st.DrawFn, num_stages: int) -> StageCosts:
    """Draw stages that are all different, and a transfer."""
    each = st.tuples(*[seconds] * num_stages)
    return StageCosts(draw(each), draw(each), draw(each), draw(st.sampled_from([0.0, 0.3])))


@st.composite
def planned(draw: st.DrawFn) -> tuple[PipelineSchedule, StageCosts, MemoryLimit]:
    """Draw a schedule of any shape with what it was computed from."""
    name = draw(st.sampled_from(sorted(SHAPES)))
    num_ranks = draw(st.integers(1, 5))
    costs = draw(costs_of(num_ranks * SHAPES[name].num_chunks))
    limit = MemoryLimit(draw(st.integers(2, 12)), draw(st.integers(1, 12)))
    return schedule_of(name, num_ranks, costs, draw(st.integers(1, 9)), limit), costs, limit


@quick
@given(planned())
def test_each_pass_runs_once_and_after_all_that_it_needs(
    drawn: tuple[PipelineSchedule, StageCosts, MemoryLimit],
) -> None:
    schedule, costs, _ = drawn
    placement, last = schedule.placement, schedule.placement.num_stages - 1
    timeline = play(schedule, costs)
    start, end = {}, {}
    for played in timeline.passes:
        kinds = (
            ("input", "weight") if played.work.kind is PassKind.BACKWARD else (played.work.kind.value.split("_")[0],)
        )
        for kind in kinds:
            key = (kind, placement.stage(played.rank, played.work.chunk), played.work.micro_batch)
            assert key not in end
            start[key], end[key] = played.start, played.end
    assert len(end) == 3 * placement.num_stages * schedule.num_microbatches

    def latency(stage: int, other: int) -> float:
        return costs.transfer if placement.rank(stage) != placement.rank(other) else 0.0

    for (kind, stage, micro_batch), started in start.items():
        if kind == "forward" and stage > 0:
            assert started >= end["forward", stage - 1, micro_batch] + latency(stage, stage - 1)
        if kind == "input":
            assert started >= end["forward", stage, micro_batch]
            if stage < last:
                assert started >= end["input", stage + 1, micro_batch] + latency(stage, stage + 1)
        if kind == "weight":
            assert end["weight", stage, micro_batch] >= end["input", stage, micro_batch]
    for rank in timeline.by_rank:
        assert all(before.end <= after.start for before, after in pairwise(rank))


@quick
@given(planned())
def test_no_rank_holds_more_than_its_memory(drawn: tuple[PipelineSchedule, StageCosts, MemoryLimit]) -> None:
    schedule, _, limit = drawn
    for order in schedule.orders:
        held = most_held(order)
        assert held.activations <= limit.activations
        assert held.deferred <= limit.deferred


@quick
@given(planned())
def test_gradients_are_summed_in_the_order_of_the_micro_batches(
    drawn: tuple[PipelineSchedule, StageCosts, MemoryLimit],
) -> None:
    schedule, _, _ = drawn
    for order in schedule.orders:
        for kind in PassKind:
            for chunk in range(schedule.placement.num_chunks):
                found = [work.micro_batch for work in order if work.kind is kind and work.chunk == chunk]
                assert found == sorted(found)


def walk_at_random_times(schedule: PipelineSchedule, all_rows: tuple[Row, ...], random: Random) -> bool:
    """Walk all rows in a random order of events, every message a rendezvous of both; tell whether all came to an end.

    A pass may run only when what it needs has been handed over by an entry that stands before it.
    """
    placement = schedule.placement
    left = [deque(row) for row in all_rows]
    have: list[set[Transfer]] = [set() for _ in left]
    while any(left):
        able = []
        for rank, row in enumerate(left):
            if not row:
                continue
            entry = row[0]
            if isinstance(entry, Pass):
                if needed_message(placement, rank, entry) in have[rank] | {None}:
                    able.append(rank)
            elif all(left[other] and left[other][0] == entry for other in entry.ranks(placement)):
                able.append(rank)
        if not able:
            return False
        entry = left[random.choice(able)][0]
        rank = random.choice([rank for rank in able if left[rank][0] is entry or left[rank][0] == entry])
        if isinstance(entry, Pass):
            left[rank].popleft()
            continue
        for other in entry.ranks(placement):
            have[other].add(entry)
            left[other].popleft()
    return True


def needed_message(placement: Placement, rank: int, work: Pass) -> Transfer | None:
    """Return the message without which a pass cannot run; None where the rank has all itself."""
    if work.kind is PassKind.WEIGHT_BACKWARD:
        return None
    is_forward = work.kind is PassKind.FORWARD
    source = placement.stage(rank, work.chunk) + (-1 if is_forward else 1)
    if not 0 <= source < placement.num_stages or placement.rank(source) == rank:
        return None
    return Transfer(is_forward, source, work.micro_batch)


@quick
@given(planned(), st.randoms(use_true_random=False))
def test_no_timing_makes_ranks_wait_for_each_other(
    drawn: tuple[PipelineSchedule, StageCosts, MemoryLimit], random: Random
) -> None:
    schedule, costs, _ = drawn
    all_rows = rows(play(schedule, costs))
    assert walk_at_random_times(schedule, all_rows, random)
    for rank, row in enumerate(all_rows):
        assert tuple(entry for entry in row if isinstance(entry, Pass)) == schedule.orders[rank]


@quick
@given(planned())
def test_both_ranks_of_a_pair_have_their_messages_in_one_order(
    drawn: tuple[PipelineSchedule, StageCosts, MemoryLimit],
) -> None:
    schedule, costs, _ = drawn
    placement = schedule.placement
    all_rows = rows(play(schedule, costs))

    def between(rank: int, other: int) -> list[Transfer]:
        entries = [entry for entry in all_rows[rank] if isinstance(entry, Transfer)]
        return [entry for entry in entries if set(entry.ranks(placement)) == {rank, other}]

    for rank in range(placement.num_ranks - 1):
        assert between(rank, rank + 1) == between(rank + 1, rank)
        assert set(Counter(between(rank, rank + 1)).values()) == {1}


def test_messages_in_the_wrong_order_are_found_by_the_walk() -> None:
    """Exchange two messages on one rank alone: the walk that proves the others must end here."""
    costs = StageCosts.equal(4, *MEASURED)
    schedule = schedule_of("v", 2, costs, 3, MemoryLimit(8, 8))
    first, second = rows(play(schedule, costs))
    where = [index for index, entry in enumerate(first) if isinstance(entry, Transfer)][:2]
    swapped = list(first)
    swapped[where[0]], swapped[where[1]] = first[where[1]], first[where[0]]
    assert not walk_at_random_times(schedule, (tuple(swapped), second), Random(0))


@quick
@given(st.data(), st.integers(1, 5), st.integers(1, 9), st.integers(2, 12), st.integers(2, 12))
def test_the_fastest_is_no_slower_than_any_shape_in_its_memory(
    data: st.DataObject, num_ranks: int, m: int, activations: int, deferred: int
) -> None:
    chunks = data.draw(costs_of(2 * num_ranks))
    found = fastest_schedule(num_ranks, chunks, m, MemoryLimit(activations, deferred))
    took = step_seconds_in(found, chunks)
    for name in ("1f1b", "zb_h1"):
        limit = MemoryLimit(activations // 2, deferred // 2)
        other = schedule_of(name, num_ranks, chunks.joined_in_pairs(), m, limit)
        assert took <= step_seconds_in(other, chunks) * (1 + 1e-9)


def step_seconds_in(schedule: PipelineSchedule, chunk_costs: StageCosts) -> float:
    """Return the time of a step, from the costs of two chunks a rank."""
    return played_in(schedule, chunk_costs).step_seconds


def played_in(schedule: PipelineSchedule, chunk_costs: StageCosts) -> Timeline:
    """Play a schedule of any shape in the costs of two chunks a rank."""
    return play(schedule, chunk_costs if schedule.placement.num_chunks == 2 else chunk_costs.joined_in_pairs())


@quick
@given(st.data(), st.integers(1, 6), st.integers(1, 20))
def test_1f1b_takes_to_the_last_bit_what_its_own_simulation_says(data: st.DataObject, num_ranks: int, m: int) -> None:
    each = st.tuples(*[seconds] * num_ranks)
    passes = PassSeconds(data.draw(each), data.draw(each))
    costs = StageCosts(passes.forward, passes.backward, (0.0,) * num_ranks)
    schedule = schedule_of("1f1b", num_ranks, costs, m, MemoryLimit(num_ranks, 1))
    assert play(schedule, costs).step_seconds == simulate(passes, m)


@quick
@given(st.data(), st.integers(1, 5), st.integers(1, 9))
def test_zb_h1_is_no_slower_than_1f1b_in_the_same_memory(data: st.DataObject, num_ranks: int, m: int) -> None:
    costs = data.draw(costs_of(num_ranks))
    limit = MemoryLimit(data.draw(st.integers(1, 6)), 1)
    split, whole = (play(schedule_of(name, num_ranks, costs, m, limit), costs) for name in ("zb_h1", "1f1b"))
    assert split.step_seconds <= whole.step_seconds * (1 + 1e-9)


@pytest.mark.parametrize("name", SHAPES)
def test_a_schedule_is_the_same_every_time(name: str) -> None:
    costs = StageCosts.equal(4 * SHAPES[name].num_chunks, *MEASURED, transfer=0.1)
    one, other = (schedule_of(name, 4, costs, 7, MemoryLimit(8, 8)) for _ in range(2))
    assert one == other
    assert hash(one) == hash(other)
    assert rows(play(one, costs)) == rows(play(other, costs))


SHARES = {
    2: (0.83, 0.74, 0.83, 0.91, 0.95, 0.98),
    4: (0.80, 0.73, 0.68, 0.78, 0.87, 0.93),
    8: (0.79, 0.75, 0.71, 0.67, 0.78, 0.85),
}
"""Of 1F1B's step time, at 1, 2, 4, ... 32 micro-batches, by number of stages."""


@pytest.mark.parametrize("num_ranks", SHARES)
def test_a_v_takes_these_shares_of_1f1b(num_ranks: int) -> None:
    shares = []
    for m in (1, 2, 4, 8, 16, 32):
        chunks = StageCosts.equal(2 * num_ranks, *(cost / 2 for cost in MEASURED))
        limit = MemoryLimit(4 * num_ranks, 4 * num_ranks)
        schedule = schedule_of("v", num_ranks, chunks, m, limit)
        shares.append(play(schedule, chunks).step_seconds / ((m + num_ranks - 1) * sum(MEASURED)))
    assert shares == pytest.approx(SHARES[num_ranks], abs=0.02)


def test_too_little_memory_is_refused() -> None:
    with pytest.raises(UserError, match=r"v schedule needs room for 2 activations and 1 deferred gradient .* not 1"):
        schedule_of("v", 2, StageCosts.equal(4, *MEASURED), 3, MemoryLimit(1, 1))


def test_an_order_in_which_ranks_wait_for_each_other_is_refused() -> None:
    backward, forward = Pass(PassKind.BACKWARD, 0, 0), Pass(PassKind.FORWARD, 0, 0)
    circle = PipelineSchedule("circle", Placement(2), 1, ((backward, forward), (forward, backward)))
    with pytest.raises(ValueError, match="wait for each other"):
        play(circle, StageCosts.equal(2, *MEASURED))
