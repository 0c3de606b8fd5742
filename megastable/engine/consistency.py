"""Compares weights that should be equal on several ranks, to the bit: what a silent fault breaks first.

There are three kinds of copies: replicas of a stage, tied weights on several stages, and whole parameters on tensor
ranks. Each 16-bit weight must also be its fp32 master, rounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megastable.core.layout import ParallelLayout
from megastable.engine.flat_partitions import FlatPartition
from megastable.engine.pipeline_module import GptPipeline
from megastable.engine.tensor_group import is_split

CHUNK_ELEMENTS = 2**20
"""Elements that are widened to 64 bits at a time."""


class ConsistencyCheck:
    """Compares all copies of the weights of a run, and each weight with its master; collective.

    Copies are compared by a checksum of each parameter, so that only 8 bytes a parameter travel.
    """

    def __init__(self, engine: Any, partitions: list[FlatPartition], layout: ParallelLayout) -> None:
        self._module: GptPipeline = engine.module
        self._partitions = partitions
        self._layout = layout
        self._grid = engine.grid
        generator = torch.Generator().manual_seed(1)  # the same weights on every rank
        # Odd, so that multiplying by one loses no bit modulo 2^64.
        weights = torch.randint(-(2**62), 2**62, (CHUNK_ELEMENTS,), generator=generator) | 1
        self._hash_weights = weights.to(engine.device)

    def differences(self) -> list[str]:
        """List every parameter that differs, with the ranks, in a line each; the same on every rank; collective."""
        own = [*self._differing_copies(), *self._differing_masters()]
        everywhere: list[list[str]] = [[]] * dist.get_world_size()
        dist.all_gather_object(everywhere, own)
        # All ranks of a group report the same line; it is kept once.
        return list(dict.fromkeys(line for lines in everywhere for line in lines))

    def _differing_copies(self) -> Iterator[str]:
        names = self._module.parameter_names()
        parameters = {name: parameter for parameter, name in names.items()}
        whole = {name: parameter for name, parameter in parameters.items() if not is_split(parameter)}
        yield from self._compare(parameters, self._grid.get_data_parallel_group(), "replicas")
        yield from self._compare(whole, self._grid.get_slice_parallel_group(), "tensor ranks")
        for weight, group in self._module.get_tied_weights_and_groups():
            yield from self._compare({names[weight]: weight}, group, "tied copies")

    def _compare(self, parameters: dict[str, nn.Parameter], group: dist.ProcessGroup, what: str) -> Iterator[str]:
        """Yield a line for every parameter that is not equal on all ranks of ``group``."""
        size = dist.get_world_size(group)
        if size == 1 or not parameters:
            return
        own = torch.stack([self._checksum(parameter.detach()) for parameter in parameters.values()])  # (parameters,)
        copies = own.new_empty(size * len(own))
        dist.all_gather_single(copies, own, group=group)
        table = copies.view(size, -1).tolist()  # a row for each rank of the group
        ranks = dist.get_process_group_ranks(group)
        for index, name in enumerate(parameters):
            values = [row[index] for row in table]
            if len(set(values)) > 1:
                odd = [rank for rank, value in zip(ranks, values, strict=True) if value in _suspects(values)]
                yield f"{what} of {name} differ: {', '.join(map(self._layout.describe, odd))}"

    def _checksum(self, weight: Tensor) -> Tensor:
        """Sum the bits of a tensor with random odd weights, so that any single change shows, and a swap does."""
        bits = _bits(weight.reshape(-1))
        total = torch.zeros((), dtype=torch.int64, device=weight.device)
        for number, chunk in enumerate(bits.split(CHUNK_ELEMENTS)):
            # The factor of a chunk is odd, too, and differs, so that equal chunks do not change places unseen.
            total += (2 * number + 1) * (chunk.to(torch.int64) * self._hash_weights[: len(chunk)]).sum()
        return total

    def _differing_masters(self) -> Iterator[str]:
        """Yield a line for every 16-bit weight on this rank that is not its fp32 master, rounded."""
        rank = self._layout.describe(dist.get_rank())
        for partition in self._partitions:
            for held in partition.held:
                rounded = partition.master.detach()[slice(*held.span)].to(held.parameter.dtype)
                # Bits, as of copies: a NaN equals nothing, and one in both is no fault of the copy.
                if not torch.equal(_bits(held.parameter.detach().view(-1)[slice(*held.local)]), _bits(rounded)):
                    yield f"{held.name} on {rank} is not its fp32 master rounded"


def _bits(weight: Tensor) -> Tensor:
    return weight.view(torch.int32 if weight.element_size() == 4 else torch.int16)


def _suspects(values: list[int]) -> set[int]:
    """Return the values outside the majority; without one, all of them."""
    most = max(values.count(value) for value in values)
    agreed = {value for value in values if values.count(value) == most}
    if len(agreed) > 1:  # of two copies, say, nothing tells which is right
        return set(values)
    return set(values) - agreed
