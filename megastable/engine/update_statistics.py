"""Norms of gradients, weights and updates of every layer, read from ZeRO's flat partitions while an update is made.

Every element of the model is looked at on exactly one rank: partitions split it over replicas, and of what several
ranks have a copy of (tied weights over stages, whole parameters over tensor ranks) one counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megastable.core.clipping import clip_coefficient
from megastable.engine.flat_partitions import FlatPartition

GRADIENT, WEIGHT, UPDATE, ZEROS, ELEMENTS = range(5)
"""Columns: three sums of squares, the number of gradient elements that are zero, and of all."""


@dataclass(frozen=True)
class _Partition:
    """This rank's flat fp32 share of a parameter group, and where the layers lie in it."""

    flat: Tensor
    spans: list[tuple[int, int]]
    layers: Tensor

    def parts(self, flat: Tensor) -> list[Tensor]:
        return [flat.narrow(0, start, length) for start, length in self.spans]


class UpdateStatistics:
    """While ``enabled``, adds up what the optimizer's next update shows; ``sums`` is (layers, 5) in fp64."""

    def __init__(
        self, module: nn.Module, optimizer: Any, partitions: list[FlatPartition], num_layers: int, clip_norm: float
    ) -> None:
        """``optimizer`` is DeepSpeed's, around torch's own; ``module`` its pipeline, whose parameters are named by the
        index of their layer.
        """
        self.enabled = False
        self._optimizer, self._clip_norm = optimizer, clip_norm
        self._partitions = _with_layers(module, partitions)
        device = self._partitions[0].flat.device
        self.sums = torch.zeros(num_layers, 5, dtype=torch.float64, device=device)
        self._before: dict[int, Tensor] = {}
        optimizer.optimizer.register_step_pre_hook(self._before_update)
        optimizer.optimizer.register_step_post_hook(self._after_update)

    def clear(self) -> None:
        """Forget the last update."""
        self.sums.zero_()

    def _before_update(self, *_: Any) -> None:
        if self.enabled:
            for partition in self._partitions:
                self._before[id(partition)] = partition.flat.detach().clone()

    def _after_update(self, *_: Any) -> None:
        if not self.enabled:
            return
        unclipped = 1.0 / clip_coefficient(float(self._optimizer._global_grad_norm), self._clip_norm)
        for partition in self._partitions:
            before = self._before.pop(id(partition))
            if not partition.spans:
                continue
            assert partition.flat.grad is not None
            gradients = partition.parts(partition.flat.grad.detach())
            columns = [
                unclipped**2 * _squares(gradients),
                _squares(partition.parts(before)),
                _squares(partition.parts(before.sub_(partition.flat.detach()))),
                torch.stack([part.numel() - part.count_nonzero() for part in gradients]).double(),
                torch.tensor([part.numel() for part in gradients], device=before.device, dtype=torch.float64),
            ]
            self.sums.index_add_(0, partition.layers, torch.stack(columns, dim=1))


def _squares(parts: list[Tensor]) -> Tensor:
    return torch.stack(torch._foreach_norm(parts)).double().square()


def _with_layers(module: nn.Module, flat_partitions: list[FlatPartition]) -> list[_Partition]:
    layer_of = {parameter: _layer_index(name) for name, parameter in module.named_parameters()}
    partitions = []
    for flat in flat_partitions:
        counted = [p for p in flat.parameters if p._hp_mapping is not None and flat.counts_here(p)]
        spans = [p._hp_mapping.hp_fragment_address for p in counted]
        layers = torch.tensor([layer_of[p] for p in counted], device=flat.master.device, dtype=torch.int64)
        partitions.append(_Partition(flat.master, [(span.start, span.numel) for span in spans], layers))
    return partitions


def _layer_index(parameter_name: str) -> int:
    """Index in the flat list of the layer that a parameter of the pipeline belongs to; the first of tied ones."""
    first = parameter_name.split(".")[0]
    return 0 if first == "tied_modules" else int(first)
