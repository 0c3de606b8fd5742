"""How the processes of a run are laid out over pipeline stages, data-parallel replicas and tensor ranks."""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt

from megastable.core.errors import UserError


def divisors(number: int) -> list[int]:
    """List the divisors of a number from 1 on, in rising order."""
    # In pairs, of which one is at most the square root: a million devices take a thousand divisions.
    small = [divisor for divisor in range(1, isqrt(number) + 1) if number % divisor == 0]
    large = [number // divisor for divisor in reversed(small)]
    # The root of a square number stands in both.
    return list(dict.fromkeys([*small, *large]))


@dataclass(frozen=True)
class ParallelLayout:
    """Counts the stages, replicas and tensor ranks of a run, whose product is the world size.

    Process ``(stage * replicas + replica) * tensor_size + tensor_rank`` has these three coordinates. The tensor ranks
    of a layer, which send the most, are neighbours, so that they share a node.
    """

    num_stages: int
    data_parallel_size: int
    tensor_parallel_size: int = 1

    @property
    def world_size(self) -> int:
        """Return the number of processes."""
        return self.num_stages * self.data_parallel_size * self.tensor_parallel_size

    @classmethod
    def of_world(
        cls, world_size: int, num_stages: int, tensor_parallel_size: int = 1, expected_world_size: int | None = None
    ) -> ParallelLayout:
        """Lay out ``world_size`` processes: what stages and tensor ranks leave are replicas.

        Raises:
            UserError: another world size was asked for, or stages x tensor size does not divide it.
        """
        if expected_world_size is not None and world_size != expected_world_size:
            raise UserError(
                f"The launch brought up {world_size} process(es), but megastable.training.world_size asks for "
                f"{expected_world_size}. Did every node and slot of the launch (hostfile, --num_nodes, --num_gpus) "
                "take part?"
            )
        replica = num_stages * tensor_parallel_size
        if world_size % replica:
            lower = world_size // replica * replica
            upper = lower + replica
            # Fewer processes than one replica have no smaller neighbour.
            legal = f"{lower} or {upper}" if lower else f"{upper}"
            # A single process leaves nothing to choose.
            instead = "stages and tensor size of 1"
            if world_size > 1:
                instead = f"stages and tensor size whose product divides {world_size}"
            raise UserError(
                f"The world size {world_size} is not megastable.pipeline.num_stages ({num_stages}) x "
                f"megastable.tensor_parallel.size ({tensor_parallel_size}) x a whole number of data-parallel replicas. "
                f"Launch {legal} processes, or choose {instead}."
            )
        return cls(num_stages, world_size // replica, tensor_parallel_size)

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """Return stage, replica and tensor rank of a process."""
        replica_rank, tensor = divmod(rank, self.tensor_parallel_size)
        stage, replica = divmod(replica_rank, self.data_parallel_size)
        return stage, replica, tensor

    def describe(self, rank: int) -> str:
        """Name a rank by its place in the layout, for messages."""
        stage, replica, tensor = self.coordinates(rank)
        return f"rank {rank} (stage {stage}, replica {replica}, tensor {tensor})"
