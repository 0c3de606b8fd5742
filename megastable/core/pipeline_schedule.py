"""What every rank of a pipeline does in a step, as data: the order of its passes.

A pipeline of p ranks has p stages, or 2p where every rank holds two chunks of layers. The chunks lie as a V: rank r
holds the stages r and 2p - 1 - r, so that the loss is computed where the data came in, and nothing is sent at the turn.

A backward pass may be split: its first half gives the gradient of the stage's input, which the stage before waits for;
its second half the gradients of the weights, which nobody needs before the update (Qi et al., arXiv 2401.10241).

``schedule_shapes`` computes orders, ``schedule_simulation`` plays them, and ``schedule_transfers`` puts the messages in
between, which gives the rows that a rank walks.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple


class PassKind(StrEnum):
    """What a pass computes."""

    FORWARD = "forward"
    INPUT_BACKWARD = "input_backward"
    WEIGHT_BACKWARD = "weight_backward"
    BACKWARD = "backward"
    """Both halves at once."""


class Pass(NamedTuple):
    """A pass of a micro-batch, counted from 0, through one of the rank's chunks."""

    kind: PassKind
    chunk: int
    micro_batch: int


@dataclass(frozen=True)
class Placement:
    """Which stage is on which rank.

    Attributes:
        num_chunks: of a rank; 1, or 2 for a V.
    """

    num_ranks: int
    num_chunks: int = 1

    def __post_init__(self) -> None:
        if self.num_ranks < 1 or self.num_chunks not in (1, 2):
            raise ValueError(f"{self.num_ranks} ranks of {self.num_chunks} chunks: at least one rank, of one or two")

    @property
    def num_stages(self) -> int:
        """Return the number of pieces into which the layers are cut."""
        return self.num_ranks * self.num_chunks

    def stage(self, rank: int, chunk: int) -> int:
        """Return the stage that a rank holds as its chunk."""
        return rank if chunk == 0 else self.num_stages - 1 - rank

    def rank(self, stage: int) -> int:
        """Return the rank that holds a stage."""
        return min(stage, self.num_stages - 1 - stage) if self.num_chunks == 2 else stage


@dataclass(frozen=True)
class StageCosts:
    """What a micro-batch takes on every stage, from the first to the last, in any unit of time.

    Attributes:
        transfer: from the end of a pass until its result has arrived on another rank; ranks compute meanwhile.
    """

    forward: tuple[float, ...]
    input_backward: tuple[float, ...]
    weight_backward: tuple[float, ...]
    transfer: float = 0.0

    def __post_init__(self) -> None:
        if not len(self.forward) == len(self.input_backward) == len(self.weight_backward):
            raise ValueError("every stage has a forward pass and both halves of a backward pass")

    @classmethod
    def equal(
        cls, num_stages: int, forward: float, input_backward: float, weight_backward: float, transfer: float = 0.0
    ) -> StageCosts:
        """Return the costs of stages that all take the same."""
        return cls((forward,) * num_stages, (input_backward,) * num_stages, (weight_backward,) * num_stages, transfer)

    def joined_in_pairs(self) -> StageCosts:
        """Return the costs of half as many stages, each of two neighbours."""

        def sums(costs: tuple[float, ...]) -> tuple[float, ...]:
            return tuple(map(sum, zip(costs[::2], costs[1::2], strict=True)))

        return StageCosts(sums(self.forward), sums(self.input_backward), sums(self.weight_backward), self.transfer)

    @cached_property
    def seconds(self) -> dict[PassKind, tuple[float, ...]]:
        """Return the time of every kind of pass, of each stage."""
        return {
            PassKind.FORWARD: self.forward,
            PassKind.INPUT_BACKWARD: self.input_backward,
            PassKind.WEIGHT_BACKWARD: self.weight_backward,
            PassKind.BACKWARD: tuple(map(sum, zip(self.input_backward, self.weight_backward, strict=True))),
        }


@dataclass(frozen=True)
class PipelineSchedule:
    """The order in which every rank runs its passes in a step.

    Attributes:
        shape: the name in ``schedule_shapes.SHAPES``.
        orders: of every rank.
    """

    shape: str
    placement: Placement
    num_microbatches: int
    orders: tuple[tuple[Pass, ...], ...]
