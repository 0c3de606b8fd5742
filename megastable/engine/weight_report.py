"""What the weights look like at the start: the std of every kind, by formula and measured over all ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch.distributed
from torch import nn

from megastable.config import RunConfig
from megastable.model.initialise import drawn_modules, formula_std, measured_moments


@dataclass(frozen=True)
class WeightKind:
    """All matrices of one name, over layers, stages, tensor ranks and replicas."""

    name: str
    formula_std: float
    measured_std: float


def weight_kinds(module: nn.Module, run: RunConfig) -> list[WeightKind]:
    """Every kind of matrix of the whole model, in order; collective. ``module`` is this rank's pipeline."""
    own: dict[str, tuple[float, int, float, float]] = {}
    for layer in _layers(module):
        for name, child in drawn_modules(layer):
            kind = f"{type(layer).__name__}.{name}".rstrip(".")
            std, *moments = own.get(kind, (formula_std(layer, child, run), 0, 0.0, 0.0))
            count, total, squares = (a + b for a, b in zip(moments, measured_moments(child), strict=True))
            own[kind] = (std, int(count), total, squares)
    everywhere: list[dict[str, tuple[float, int, float, float]]] = [{}] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everywhere, own)
    kinds = list(dict.fromkeys(kind for rank in everywhere for kind in rank))
    return [_merge(kind, [rank[kind] for rank in everywhere if kind in rank]) for kind in kinds]


def _layers(module: nn.Module) -> list[nn.Module]:
    """The layers of a stage: those in its list, and those that are tied and stand in a dictionary."""
    tied = module.tied_modules if isinstance(module.tied_modules, nn.ModuleDict) else nn.ModuleDict()
    listed = [child for name, child in module.named_children() if name != "tied_modules"]
    return [*tied.values(), *listed]


def _merge(kind: str, parts: list[tuple[float, int, float, float]]) -> WeightKind:
    count, total, squares = (sum(part[index] for part in parts) for index in (1, 2, 3))
    return WeightKind(kind, parts[0][0], math.sqrt(max(0.0, squares / count - (total / count) ** 2)))
