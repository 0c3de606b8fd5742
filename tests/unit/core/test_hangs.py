"""Which rank of a run that hangs is stuck."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.core.hangs import Answer, hang_report, stuck_and_waiting

NAMES = [f"rank {rank} (of the layout)" for rank in range(8)]


def answer(rank: int, idle_seconds: float = 1.0, **entered: int) -> Answer:
    return Answer(rank, f"step 3 (Place{rank % 2})", idle_seconds, f'  File "{rank}.py"\n', entered)


Collective = tuple[str, tuple[int, ...]]
"""Name and ranks of its group."""


def run_until_it_hangs(program: list[Collective], world_size: int, stops: int, after: int) -> list[Answer]:
    """Let ranks enter the collectives of a program, each in its order, while one stops after some of its own.

    A collective is left once all its ranks have entered it.
    """
    own = {rank: [op for op in program if rank in op[1]] for rank in range(world_size)}
    own[stops] = own[stops][:after]
    place = dict.fromkeys(range(world_size), 0)
    entered: dict[int, dict[str, int]] = {
        rank: {name: 0 for name, ranks in program if rank in ranks} for rank in range(world_size)
    }
    is_in: dict[int, Collective | None] = dict.fromkeys(range(world_size))
    clock = 0.0
    stopped_at = dict.fromkeys(range(world_size), 0.0)
    moved = True
    while moved:
        moved = False
        for rank in range(world_size):
            if is_in[rank] is None and place[rank] < len(own[rank]):
                is_in[rank] = own[rank][place[rank]]
                entered[rank][is_in[rank][0]] += 1  # type: ignore[index]
                clock += 1
                stopped_at[rank] = clock
                moved = True
        for name, ranks in set(program):
            if all(is_in[rank] == (name, ranks) for rank in ranks):
                for rank in ranks:
                    is_in[rank] = None
                    place[rank] += 1
                moved = True
    return [
        Answer(rank, "", clock - stopped_at[rank], "", entered[rank])
        for rank in range(world_size)
        if is_in[rank] is not None or rank == stops
    ]


@settings(deadline=None)  # the machine may be busy
@given(data=st.data())
def test_a_rank_that_stops_is_named_in_any_program_and_layout(data: st.DataObject) -> None:
    world_size = data.draw(st.integers(2, 6))
    groups = data.draw(st.lists(st.sets(st.integers(0, world_size - 1), min_size=2), min_size=1, max_size=5))
    named = [(f"group{number}", tuple(sorted(ranks))) for number, ranks in enumerate(groups)]
    program = data.draw(st.lists(st.sampled_from(named), min_size=1, max_size=12))
    stops = data.draw(st.integers(0, world_size - 1))
    after = data.draw(st.integers(0, 12))
    answers = run_until_it_hangs(program, world_size, stops, after)
    if len(answers) == 1:
        return  # nobody waits
    random.Random(0).shuffle(answers)
    stuck, waiting = stuck_and_waiting(answers)
    assert stuck.rank == stops
    assert any(count > stuck.entered.get(name, count) for name, count in waiting.entered.items())


def test_ranks_that_only_send_are_named_by_time() -> None:
    answers = [answer(0, 8.5), answer(1, 9.0), answer(2, 8.0)]
    stuck, waiting = stuck_and_waiting(answers)
    assert (stuck.rank, waiting.rank) == (1, 0)


def test_of_ranks_that_wait_for_each_other_the_first_is_named_with_one_that_waits_for_it() -> None:
    answers = [answer(0, 9.0, a=3, b=3), answer(1, 8.0, a=4, b=2), answer(2, 7.0, b=3)]
    stuck, waiting = stuck_and_waiting(answers)
    assert (stuck.rank, waiting.rank) == (0, 1)


@settings(deadline=None)
@given(st.builds(answer, st.integers(0, 7), st.floats(0, 1e9)))
def test_an_answer_survives_the_store(given_answer: Answer) -> None:
    assert Answer.from_json(given_answer.to_json()) == given_answer


def test_a_report_has_both_stacks_and_the_places_of_the_others() -> None:
    answers = [answer(0, 9.0, a=2), answer(1, 9.5, a=1), answer(2, 1.0), answer(3, 1.0), answer(4, 1.0)]
    assert hang_report("why", answers, {}, NAMES).splitlines() == [
        "[megastable] the run hangs: why",
        "[megastable] stuck: rank 1 (of the layout), at step 3 (Place1) for 10 s:",
        '      File "1.py"',
        "[megastable] waits: rank 0 (of the layout), at step 3 (Place0) for 9 s:",
        '      File "0.py"',
        "[megastable] at step 3 (Place0): rank 2, 4",
        "[megastable] at step 3 (Place1): rank 3",
    ]


def test_ranks_that_do_not_answer_are_the_stuck_ones() -> None:
    lines = hang_report(
        "why", [answer(0, 1.0, a=2), answer(1, 2.0, a=1)], {5: "step 2", 6: "step 1"}, NAMES
    ).splitlines()
    assert lines[1].startswith("[megastable] stuck: rank 5 (of the layout), last heard at step 2. It does not answer")
    assert lines[2].startswith("[megastable] stuck: rank 6 (of the layout), last heard at step 1.")
    assert lines[3:] == [
        "[megastable] waits: rank 1 (of the layout), at step 3 (Place1) for 2 s:",
        '      File "1.py"',
        "[megastable] at step 3 (Place0): rank 0",
    ]


def test_a_rank_that_is_cut_off_reports_itself() -> None:
    lines = hang_report("why", [answer(0)], {}, NAMES).splitlines()
    assert [line.split(":")[0] for line in lines[:2]] == ["[megastable] the run hangs", "[megastable] waits"]
    assert len(lines) == 3
