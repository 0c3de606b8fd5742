"""The rows that a rank walks: its passes, with the messages to and from other ranks in between.

All ranks' passes and messages are put into one order, by the times at which they end in the model of the costs, and
each rank walks what concerns it. Whatever the real times are, the first event of that order that has not happened can
happen. So nobody waits in a circle, not even where a send waits for its receive, and both ranks of a pair see their
messages in the same order, activations and gradients mixed.

An executor walks a row from the first entry to the last. At a ``Transfer`` it posts the send or the receive without
waiting, each receive into a fresh buffer; the entry stands in front of the pass during which the message arrives. At a
``Pass`` it waits for the one message that the pass needs, if any, which an entry above has posted, and runs it. After
the last entry it waits for its sends. At the turn of a V a rank hands its output to itself, without a message.
"""

from __future__ import annotations

from operator import attrgetter
from typing import NamedTuple

from megastable.core.pipeline_schedule import Pass, PassKind, Placement
from megastable.core.schedule_simulation import PlayedPass, Timeline


class Transfer(NamedTuple):
    """A message between the ranks of two neighbouring stages, the same entry in the rows of both.

    Attributes:
        from_stage: an activation goes to the stage after it, a gradient to the stage before it.
    """

    is_activation: bool
    from_stage: int
    micro_batch: int

    @property
    def to_stage(self) -> int:
        """Return the stage whose pass needs the message."""
        return self.from_stage + 1 if self.is_activation else self.from_stage - 1

    def ranks(self, placement: Placement) -> tuple[int, int]:
        """Return who sends and who receives."""
        return placement.rank(self.from_stage), placement.rank(self.to_stage)


Row = tuple[Pass | Transfer, ...]
"""What a rank does in a step, up to the update."""


def rows(timeline: Timeline) -> tuple[Row, ...]:
    """Put the messages of a schedule between the passes of every rank, in the order in which they were played."""
    placement = timeline.schedule.placement
    entries: list[list[Pass | Transfer]] = [[] for _ in range(placement.num_ranks)]
    # The sort is stable, so of passes that end together those that others waited for stay in front.
    for played in sorted(timeline.passes, key=attrgetter("end")):
        entries[played.rank].append(played.work)
        transfer = _message(played, placement)
        if transfer is not None:
            for rank in transfer.ranks(placement):
                entries[rank].append(transfer)
    return tuple(map(tuple, entries))


def _message(played: PlayedPass, placement: Placement) -> Transfer | None:
    """Return what a pass sends, if another rank needs its result."""
    kind, chunk, micro_batch = played.work
    if kind is PassKind.WEIGHT_BACKWARD:
        return None
    transfer = Transfer(kind is PassKind.FORWARD, placement.stage(played.rank, chunk), micro_batch)
    if not 0 <= transfer.to_stage < placement.num_stages:
        return None
    sender, receiver = transfer.ranks(placement)
    return transfer if sender != receiver else None
