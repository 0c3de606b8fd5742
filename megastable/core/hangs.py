"""Finds, in what the ranks of a run that hangs answer about themselves, the one that the others wait for."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Answer:
    """Holds what a rank says of itself when the run hangs.

    Attributes:
        rank: its number.
        doing: where it is, such as step 12 (ReduceGrads).
        idle_seconds: the time since it last made progress.
        stack: the Python stack of its main thread.
        entered: how many collectives it has entered in each of its groups, by a name that all members know.
    """

    rank: int
    doing: str
    idle_seconds: float
    stack: str
    entered: Mapping[str, int]

    def to_json(self) -> str:
        """Return the answer as text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Answer:
        """Read the text of ``to_json``."""
        return cls(**json.loads(text))


def stuck_and_waiting(answers: Sequence[Answer]) -> tuple[Answer, Answer]:
    """Name, of two ranks or more, the one that keeps the others waiting, and one that waits for it.

    Who has entered more collectives of a group than another member waits for it there. Who is waited for and waits for
    nobody is stuck: it does something else, or is where nobody else takes part. Where all wait for each other, or two
    ranks that send to each other have no collectives to count, it is the one that was the first to stop.
    """
    waiting_for: dict[int, list[Answer]] = {answer.rank: [] for answer in answers}
    waits: set[int] = set()
    for group in {name for answer in answers for name in answer.entered}:
        members = [answer for answer in answers if group in answer.entered]
        most = max(answer.entered[group] for answer in members)
        ahead = [answer for answer in members if answer.entered[group] == most]
        behind = [answer for answer in members if answer.entered[group] < most]
        for answer in behind:
            waiting_for[answer.rank] += ahead
            waits.update(other.rank for other in ahead)

    def suspicion(answer: Answer) -> tuple[bool, bool, float]:
        return bool(waiting_for[answer.rank]), answer.rank not in waits, answer.idle_seconds

    stuck = max(answers, key=suspicion)
    others = waiting_for[stuck.rank] or [answer for answer in answers if answer is not stuck]
    return stuck, max(others, key=_idle_seconds)


def hang_report(reason: str, answers: Sequence[Answer], silent: Mapping[int, str], names: Sequence[str]) -> str:
    """Return the lines for the user: who is stuck and who waits, with their stacks, and where the others are.

    Args:
        reason: by what the hang was noticed.
        answers: what the ranks that live have answered, one at least; two, unless this rank is cut off from the others.
        silent: the other ranks, with where each was when it was last heard.
        names: layout, process and host of every rank.
    """
    lines = [f"the run hangs: {reason}"]
    for rank, last_place in silent.items():
        lines.append(
            f"stuck: {names[rank]}, last heard at {last_place}. It does not answer and cannot show its stack: it is "
            "stopped or dead, its machine is cut off, or code that holds Python's lock does not return"
        )
    told = [max(answers, key=_idle_seconds)]
    if not silent and len(answers) > 1:
        told = list(stuck_and_waiting(answers))
        lines.append(f"stuck: {_place_and_stack(told[0], names)}")
    lines.append(f"waits: {_place_and_stack(told[-1], names)}")
    places: dict[str, list[str]] = {}
    for answer in answers:
        if answer not in told:
            places.setdefault(answer.doing, []).append(str(answer.rank))
    lines += [f"at {place}: rank {', '.join(ranks)}" for place, ranks in places.items()]
    return "\n".join(f"[megastable] {line}" for line in lines)


def _idle_seconds(answer: Answer) -> float:
    return answer.idle_seconds


def _place_and_stack(answer: Answer, names: Sequence[str]) -> str:
    stack = textwrap.indent(answer.stack.rstrip("\n"), "    ")
    return f"{names[answer.rank]}, at {answer.doing} for {answer.idle_seconds:.0f} s:\n{stack}"
