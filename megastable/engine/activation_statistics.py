"""Largest activation and attention logit of every layer, over all micro-batches of a step."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.pipe import PipelineModule
from torch import Tensor, nn

from megastable.model.attention import QueryKeyScale
from megastable.model.ends import LogitCap, OutputHead
from megastable.model.tensor_parallel import ColumnParallelLinear, RowParallelLinear

ACTIVATION, ATTENTION_LOGIT = range(2)


class ActivationStatistics:
    """While ``enabled``, keeps the largest magnitudes that this rank sees; ``maxima`` is (layers, 2) in fp32.

    Activations are a layer's output and what goes into and comes out of the linear layers inside it; the head's are the
    logits before any cap. An attention logit is the product of a scaled query and key, masked pairs included, since
    those overflow like the others.
    """

    def __init__(self, module: PipelineModule, num_layers: int, first_layer: int, device: torch.device) -> None:
        self.enabled = False
        self.maxima = torch.zeros(num_layers, 2, device=device)
        for index, layer in enumerate(module.forward_funcs, first_layer):
            if isinstance(layer, nn.Module) and not isinstance(layer, OutputHead):
                layer.register_forward_hook(self._watch(index, inputs=False, outputs=True))
                for child in layer.modules():
                    if isinstance(child, QueryKeyScale):
                        child.register_forward_hook(self._watch_product(index))
                    elif isinstance(child, ColumnParallelLinear | RowParallelLinear):
                        inner = isinstance(child, RowParallelLinear)
                        child.register_forward_hook(self._watch(index, inputs=inner, outputs=True))
        for child in module.modules():
            if isinstance(child, LogitCap):
                child.register_forward_hook(self._watch(num_layers - 1, inputs=True, outputs=False))

    def clear(self) -> None:
        """Forget the last step."""
        self.maxima.zero_()

    def _watch(self, layer: int, inputs: bool, outputs: bool) -> Any:
        def hook(_: nn.Module, arguments: tuple[Tensor], output: Tensor) -> None:
            if self.enabled and inputs:
                self._see(layer, ACTIVATION, arguments[0].detach())
            if self.enabled and outputs:
                self._see(layer, ACTIVATION, output.detach())

        return hook

    def _watch_product(self, layer: int) -> Any:
        def hook(_: nn.Module, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
            if self.enabled:
                q, k = (part.detach() for part in output)
                if q.device.type == "cpu":  # where products of 16 bits are emulated
                    q, k = q.float(), k.float()
                groups = q.shape[1] // k.shape[1]
                for head in range(q.shape[1]):  # one at a time: the products of all heads may not fit
                    self._see(layer, ATTENTION_LOGIT, q[:, head] @ k[:, head // groups].transpose(-1, -2))

        return hook

    def _see(self, layer: int, kind: int, values: Tensor) -> None:
        smallest, largest = torch.aminmax(values)
        magnitude = torch.maximum(-smallest, largest).float().nan_to_num(nan=torch.inf, posinf=torch.inf)
        torch.maximum(self.maxima[layer, kind], magnitude, out=self.maxima[layer, kind])
