"""How the processes of a run are laid out over pipeline stages, data-parallel replicas and tensor ranks."""

from __future__ import annotations

from dataclasses import dataclass

from megastable.core.errors import UserError


@dataclass(frozen=True)
class ParallelLayout:
    """world = stages x replicas x tensor. rank = (stage * replicas + replica) * tensor size + tensor rank.

    The tensor ranks of a layer, which send the most, are neighbours, so that they share a node.
    """

    num_stages: int
    data_parallel_size: int
    tensor_parallel_size: int = 1

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.num_stages * self.data_parallel_size * self.tensor_parallel_size

    @classmethod
    def of_world(
        cls, world_size: int, num_stages: int, tensor_parallel_size: int = 1, expected_world_size: int | None = None
    ) -> ParallelLayout:
        """The layout of ``world_size`` processes.

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
            lower, upper = world_size // replica * replica, (world_size // replica + 1) * replica
            raise UserError(
                f"The world size {world_size} is not megastable.pipeline.num_stages ({num_stages}) x "
                f"megastable.tensor_parallel.size ({tensor_parallel_size}) x a whole number of data-parallel replicas. "
                f"Launch {f'{lower} or ' if lower else ''}{upper} processes, or choose stages and tensor size whose "
                f"product divides {world_size}."
            )
        return cls(num_stages, world_size // replica, tensor_parallel_size)

    def describe(self, rank: int) -> str:
        """A rank's name for people: where in the layout it stands."""
        replica_rank, tensor = divmod(rank, self.tensor_parallel_size)
        stage, replica = divmod(replica_rank, self.data_parallel_size)
        return f"rank {rank} (stage {stage}, replica {replica}, tensor {tensor})"


def stage_bounds(num_layers: int, num_stages: int, layers_before: int, layers_after: int) -> list[int]:
    """Where the flat list of layers is cut: ``num_stages + 1`` bounds, each stage is ``[bounds[i], bounds[i + 1])``.

    The list holds ``layers_before`` layers (embedding), ``num_layers`` blocks and ``layers_after`` layers (norm and
    head). Blocks are spread evenly; the last stages, which also hold the dear head, get fewer when they do not divide.
    Every stage holds a block, hence weights of its own: DeepSpeed's BF16_Optimizer fails on a stage whose only
    weight is the tied copy of the embedding.

    Raises:
        UserError: fewer blocks than stages.
    """
    if num_layers < num_stages:
        raise UserError(
            f"megastable.model.num_layers ({num_layers}) is smaller than megastable.pipeline.num_stages "
            f"({num_stages}); every stage needs a block of its own"
        )
    per_stage, remainder = divmod(num_layers, num_stages)
    bounds = [0]
    for stage in range(num_stages):
        bounds.append(bounds[-1] + per_stage + (stage < remainder) + (layers_before if stage == 0 else 0))
    bounds[-1] += layers_after
    return bounds
