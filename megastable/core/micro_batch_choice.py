"""Which split of a batch into micro-batches a cost finds fastest within the memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from megastable.core.batch_rampup import Batch
from megastable.core.errors import UserError
from megastable.core.pipeline_cost import PipelineCost

GIB = 2**30


@dataclass(frozen=True)
class MicroBatchChoice:
    """What the choice goes by.

    Attributes:
        cost: of a step, on the layout of the run.
        needed_bytes: of a step's batch, on the device that needs most.
        usable_bytes: of a device; infinite where it is not known.
    """

    data_parallel_size: int
    cost: PipelineCost
    needed_bytes: Callable[[Batch], float]
    usable_bytes: float

    def batch_of(self, global_batch_size: int) -> Batch:
        """The fastest split that fits; of equally fast ones that with the smaller micro-batch, which needs less memory.

        Args:
            global_batch_size: a multiple of the data-parallel size.

        Raises:
            UserError: no split fits.
        """
        splits = self._splits(global_batch_size)
        needs = [self.needed_bytes(batch) for batch in splits]
        fitting = [batch for batch, needed in zip(splits, needs, strict=True) if needed <= self.usable_bytes]
        if not fitting:
            least = min(needs)
            raise UserError(
                f"no split of global batch {global_batch_size} over {self.data_parallel_size} replicas fits: "
                f"micro-batches of {splits[needs.index(least)].micro_batch_size} need least, {least / GIB:.2f} GiB a "
                f"device, and {self.usable_bytes / GIB:.2f} are usable"
            )
        return min(fitting, key=self._step_seconds)  # the first of several, and the splits rise

    def micro_batch_size_steps(self, global_batch_sizes: Iterable[int]) -> tuple[tuple[int, int], ...]:
        """The chosen sizes as ``BatchRampup`` has them: (from_global_batch_size, micro_batch_size), only the changes.

        Args:
            global_batch_sizes: rising, each a multiple of the data-parallel size.

        Raises:
            UserError: as ``batch_of``.
        """
        steps: list[tuple[int, int]] = []
        for global_batch_size in global_batch_sizes:
            size = self.batch_of(global_batch_size).micro_batch_size
            if not steps or steps[-1][1] != size:
                steps.append((global_batch_size, size))
        return tuple(steps)

    def _splits(self, global_batch_size: int) -> list[Batch]:
        samples = global_batch_size // self.data_parallel_size
        sizes = [size for size in range(1, samples + 1) if samples % size == 0]
        return [Batch(global_batch_size, size, samples // size) for size in sizes]

    def _step_seconds(self, batch: Batch) -> float:
        return self.cost.step_seconds(batch.micro_batch_size, batch.num_microbatches)
