"""Largest activation and attention logit of every layer, over all micro-batches of a step."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.pipe import PipelineModule
from torch import Tensor, nn

from megastable.model.attention import QueryKeyScale
from megastable.model.ends import LogitCap, OutputHead

ACTIVATION, ATTENTION_LOGIT = range(2)


class ActivationStatistics:
    """While ``enabled``, keeps the largest magnitudes that this rank sees; ``maxima`` is (layers, 2) in fp32.

    A layer's activation is its output; the head's are the logits before any cap. An attention logit is the product of a
    scaled query and key, masked pairs included, since those overflow like the others.
    """

    def __init__(self, module: PipelineModule, num_layers: int, first_layer: int, device: torch.device) -> None:
        self.enabled = False
        self.maxima = torch.zeros(num_layers, 2, device=device)
        for index, layer in enumerate(module.forward_funcs, first_layer):
            if isinstance(layer, nn.Module) and not isinstance(layer, OutputHead):
                layer.register_forward_hook(self._watch_output(index))
                for child in layer.modules():
                    if isinstance(child, QueryKeyScale):
                        child.register_forward_hook(self._watch_product(index))
        for child in module.modules():
            if isinstance(child, LogitCap):
                child.register_forward_hook(self._watch_input(num_layers - 1))

    def clear(self) -> None:
        """Forget the last step."""
        self.maxima.zero_()

    def _watch_output(self, layer: int) -> Any:
        def hook(_: nn.Module, inputs: Any, output: Tensor) -> None:
            if self.enabled:
                self._see(layer, ACTIVATION, output.detach())

        return hook

    def _watch_input(self, layer: int) -> Any:
        def hook(_: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
            if self.enabled:
                self._see(layer, ACTIVATION, inputs[0].detach())

        return hook

    def _watch_product(self, layer: int) -> Any:
        def hook(_: nn.Module, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
            if self.enabled:
                q, k = output[0].detach().float(), output[1].detach().float()
                groups = q.shape[1] // k.shape[1]
                for head in range(k.shape[1]):  # one at a time: the products of all heads may not fit
                    shared = k[:, head : head + 1].transpose(-1, -2)
                    self._see(layer, ATTENTION_LOGIT, q[:, head * groups : (head + 1) * groups] @ shared)

        return hook

    def _see(self, layer: int, kind: int, values: Tensor) -> None:
        smallest, largest = torch.aminmax(values)
        magnitude = torch.maximum(-smallest, largest).float().nan_to_num(nan=torch.inf, posinf=torch.inf)
        torch.maximum(self.maxima[layer, kind], magnitude, out=self.maxima[layer, kind])
