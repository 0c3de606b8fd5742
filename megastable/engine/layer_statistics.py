"""What is measured of layers: their weights as they were drawn, and activations and updates in a watched step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from torch import Tensor, nn

from megastable.config import RunConfig
from megastable.core.clipping import clip_coefficient
from megastable.core.pieces import Span
from megastable.engine.flat_partitions import FlatPartition
from megastable.engine.pipeline_module import GptPipeline
from megastable.model.attention import QueryKeyScale
from megastable.model.ends import LogitCap, OutputHead
from megastable.model.initialise import drawn_modules, formula_std, measured_moments
from megastable.model.tensor_parallel import ColumnParallelLinear, RowParallelLinear

ACTIVATION, ATTENTION_LOGIT = range(2)
"""Columns of the statistics of activations."""

GRADIENT, WEIGHT, UPDATE, ZEROS, ELEMENTS = range(5)
"""Columns of the statistics of updates: three sums of squares, gradient elements that are zero, and all of them."""

Hook = Callable[..., None]


class ActivationStatistics:
    """Keeps, while ``enabled``, the largest magnitudes of activations and attention logits that this rank computes.

    Activations are a layer's output and what goes into and comes out of the linear layers inside it; the head's are the
    logits before any cap. An attention logit is the product of a scaled query and key, masked pairs included, since
    those overflow like the others.

    Attributes:
        maxima: (layers, 2) in fp32, over all micro-batches since ``clear``.
    """

    def __init__(self, num_layers: int, device: torch.device) -> None:
        self.enabled = False
        self.maxima = torch.zeros(num_layers, 2, device=device)

    def attach_hooks(self, module: PipelineModule, first_layer: int) -> None:
        """Hook into the layers of this rank's stage, of which ``first_layer`` is the first one's index in the model."""
        for index, layer in enumerate(module.forward_funcs, first_layer):
            # A head is left to the hook on its cap, through which the logits of a tied head pass, too: that one is a
            # function in this list and no module.
            if isinstance(layer, nn.Module) and not isinstance(layer, OutputHead):
                layer.register_forward_hook(self._output_hook(index))
                for child in layer.modules():
                    if isinstance(child, QueryKeyScale):
                        child.register_forward_hook(self._product_hook(index))
                    elif isinstance(child, ColumnParallelLinear):
                        # Its input comes out of a norm, which keeps it small.
                        child.register_forward_hook(self._output_hook(index))
                    elif isinstance(child, RowParallelLinear):
                        child.register_forward_hook(self._input_hook(index))
                        child.register_forward_hook(self._output_hook(index))
        last_layer = len(self.maxima) - 1
        for child in module.modules():
            if isinstance(child, LogitCap):
                child.register_forward_hook(self._input_hook(last_layer))

    def clear(self) -> None:
        """Forget the last step."""
        self.maxima.zero_()

    def _input_hook(self, layer: int) -> Hook:
        def hook(_: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
            if self.enabled:
                self._record(layer, ACTIVATION, inputs[0].detach())

        return hook

    def _output_hook(self, layer: int) -> Hook:
        def hook(_: nn.Module, inputs: Any, output: Tensor) -> None:
            if self.enabled:
                self._record(layer, ACTIVATION, output.detach())

        return hook

    def _product_hook(self, layer: int) -> Hook:
        def hook(_: nn.Module, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
            if not self.enabled:
                return
            # (batch, heads, seq, head_dim); of keys there may be fewer heads, each shared by a group of queries' heads
            q, k = (part.detach() for part in output)
            if q.device.type == "cpu":  # where products of 16 bits are emulated
                q = q.float()
                k = k.float()
            groups = q.shape[1] // k.shape[1]
            # One head at a time: (batch, seq, seq) of all heads may not fit.
            for head in range(q.shape[1]):
                self._record(layer, ATTENTION_LOGIT, q[:, head] @ k[:, head // groups].transpose(-1, -2))

        return hook

    def _record(self, layer: int, column: int, values: Tensor) -> None:
        # One pass over the values and no copy of them, which abs() would make.
        smallest, largest = torch.aminmax(values)
        # The maximum over ranks may lose a nan, whose comparisons are all false; as an infinity it arrives.
        magnitude = torch.maximum(-smallest, largest).float().nan_to_num(nan=torch.inf, posinf=torch.inf)
        torch.maximum(self.maxima[layer, column], magnitude, out=self.maxima[layer, column])


@dataclass(frozen=True)
class _Partition:
    """This rank's flat fp32 share of a parameter group, and which of its spans belong to which layer."""

    flat: Tensor
    spans: list[Span]
    layers: Tensor  # (spans,), the index of each span's layer

    def parts(self, flat: Tensor) -> list[Tensor]:
        """Cut a tensor of the share's size into the spans."""
        return [flat[start:stop] for start, stop in self.spans]


class UpdateStatistics:
    """Adds up, while ``enabled``, norms of gradients, weights and updates of every layer during the optimizer's update.

    They are read from ZeRO's flat partitions. Every element of the model is counted on exactly one rank: partitions
    split it over replicas, and of copies on several ranks (tied weights on stages, whole parameters on tensor ranks)
    one counts.

    Args:
        module: this rank's pipeline.
        optimizer: DeepSpeed's optimizer around torch's own.

    Attributes:
        sums: (layers, 5) in fp64, since ``clear``.
    """

    def __init__(
        self, module: GptPipeline, optimizer: Any, partitions: list[FlatPartition], num_layers: int, clip_norm: float
    ) -> None:
        self.enabled = False
        self._optimizer = optimizer
        self._clip_norm = clip_norm
        self._partitions = _with_layers(module, partitions)
        device = self._partitions[0].flat.device
        self.sums = torch.zeros(num_layers, 5, dtype=torch.float64, device=device)
        self._before: dict[int, Tensor] = {}

    def attach_hooks(self) -> None:
        """Hook into the update of torch's optimizer, between clipping and the return to 16 bits."""
        self._optimizer.optimizer.register_step_pre_hook(self._before_update)
        self._optimizer.optimizer.register_step_post_hook(self._after_update)

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
        # The optimizer was handed clipped gradients; reported are those before clipping.
        unclipped = 1.0 / clip_coefficient(float(self._optimizer._global_grad_norm), self._clip_norm)
        for partition in self._partitions:
            before = self._before.pop(id(partition))
            if not partition.spans:
                continue
            assert partition.flat.grad is not None
            gradients = partition.parts(partition.flat.grad.detach())
            columns = [  # each (spans,)
                unclipped**2 * _squares(gradients),
                _squares(partition.parts(before)),
                _squares(partition.parts(before.sub_(partition.flat.detach()))),
                torch.stack([part.numel() - part.count_nonzero() for part in gradients]).double(),
                torch.tensor([part.numel() for part in gradients], device=before.device, dtype=torch.float64),
            ]
            self.sums.index_add_(0, partition.layers, torch.stack(columns, dim=1))


def _squares(parts: list[Tensor]) -> Tensor:
    """Return the sum of squares of each part, (parts,) in fp64."""
    return torch.stack(torch._foreach_norm(parts)).double().square()


def _with_layers(module: GptPipeline, flat_partitions: list[FlatPartition]) -> list[_Partition]:
    index_of = {name: index for index, name in enumerate(module.layer_names)}
    partitions = []
    for flat in flat_partitions:
        counted = [held for held in flat.held if held.is_counted]
        # A tied weight has the name of the first layer that it is in, to which it is counted.
        indices = [index_of[held.name.split(".")[0]] for held in counted]
        layers = torch.tensor(indices, device=flat.master.device, dtype=torch.int64)
        partitions.append(_Partition(flat.master, [held.span for held in counted], layers))
    return partitions


def movement_since(
    module: GptPipeline, partitions: list[FlatPartition], before: list[Tensor], num_layers: int
) -> list[float]:
    """Return how far the weights of every layer have moved, as a share of their norm then; collective.

    Args:
        before: the fp32 masters of every partition as they were, on any device.

    Returns:
        0 for a layer without weights of its own; infinity where a weight is not finite.
    """
    device = partitions[0].master.device
    sums = torch.zeros(num_layers, 2, dtype=torch.float64, device=device)  # squares of the way, and of the weights then
    for partition, then in zip(_with_layers(module, partitions), before, strict=True):
        if partition.spans:
            old = then.to(device)
            way = partition.flat.detach() - old
            columns = [_squares(partition.parts(way)), _squares(partition.parts(old))]
            sums.index_add_(0, partition.layers, torch.stack(columns, dim=1))
    dist.all_reduce(sums)
    shares = [math.sqrt(way / weight) if weight else 0.0 for way, weight in sums.tolist()]
    return [math.inf if math.isnan(share) else share for share in shares]


@dataclass(frozen=True)
class WeightKind:
    """The std of all matrices of one name, over layers, stages, tensor ranks and replicas, drawn and measured."""

    name: str
    formula_std: float
    measured_std: float


def weight_kinds(module: nn.Module, run: RunConfig) -> list[WeightKind]:
    """Measure every kind of matrix of the whole model, in order; collective. ``module`` is this rank's pipeline."""
    own: dict[str, tuple[float, int, float, float]] = {}  # the formula's std, then count, sum and sum of squares
    for layer in _layers(module):
        for name, child in drawn_modules(layer):
            kind = f"{type(layer).__name__}.{name}".rstrip(".")
            std, *moments = own.get(kind, (formula_std(layer, child, run), 0, 0.0, 0.0))
            count, total, squares = (a + b for a, b in zip(moments, measured_moments(child), strict=True))
            own[kind] = (std, int(count), total, squares)
    everywhere: list[dict[str, tuple[float, int, float, float]]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everywhere, own)
    kinds = list(dict.fromkeys(kind for rank in everywhere for kind in rank))
    return [_merge(kind, [rank[kind] for rank in everywhere if kind in rank]) for kind in kinds]


def _layers(module: nn.Module) -> list[nn.Module]:
    """List the layers of a stage: those in its list, and the tied ones, which stand in a dictionary."""
    assert isinstance(module.tied_modules, nn.ModuleDict)
    listed = [child for name, child in module.named_children() if name != "tied_modules"]
    return [*module.tied_modules.values(), *listed]


def _merge(kind: str, parts: list[tuple[float, int, float, float]]) -> WeightKind:
    # All parts of a kind have equally many copies, which leaves mean and variance as they are.
    count, total, squares = (sum(part[index] for part in parts) for index in (1, 2, 3))
    variance = squares / count - (total / count) ** 2
    return WeightKind(kind, parts[0][0], math.sqrt(max(0.0, variance)))  # rounding may leave it below zero
