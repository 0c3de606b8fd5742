"""Our model in one process, without an engine, with the weights of a checkpoint."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megastable.config import RunConfig
from megastable.interop.saved_model import SavedModel
from megastable.model.layers import Layer, gpt_layers
from megastable.model.tensor_parallel import OneProcess


class OneProcessModel(nn.Module):
    """The flat list of layers, called one after the other.

    Args:
        run: whose model it is; how a step is computed does not matter here.
    """

    def __init__(self, run: RunConfig) -> None:
        super().__init__()
        self._forwards = []
        self._layers: dict[str, nn.Module] = {}
        for layer in gpt_layers(_plain(run), OneProcess()):
            name = layer.tied_key or layer.name
            if name not in self._layers:
                self._layers[name] = layer.module_class(*layer.arguments)
                self.add_module(name, self._layers[name])
            self._forwards.append(_forward_of(layer, self._layers[name]))

    def forward(self, token_ids: Tensor) -> Tensor:
        """Compute logits (batch, seq, vocabulary) from token ids (batch, seq)."""
        x: Any = token_ids
        for forward in self._forwards:
            x = forward(x)
        return x


def _forward_of(layer: Layer, module: nn.Module) -> Any:
    if layer.forward is None:
        return module
    tied = layer.forward
    return lambda x: tied(module, x)


def load_model(saved: SavedModel, weight_format: torch.dtype = torch.float32) -> OneProcessModel:
    """Build the model of a checkpoint for evaluation, in fp32.

    Args:
        weight_format: to which the weights are rounded first.

    Raises:
        UserError: the checkpoint lacks a tensor, or cannot be read.
    """
    model = OneProcessModel(saved.run)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(saved.tensor(name).to(weight_format))
    return model.eval()


def _plain(run: RunConfig) -> RunConfig:
    """Return the run with all logits at once, no row that pads the vocabulary, and attention as any device has it."""
    sections = run.megastable
    model = sections.model.model_copy(update={"vocab_padding_multiple": 1, "attention": "auto"})
    training = sections.training.model_copy(update={"loss_chunk_tokens": None})
    changed = sections.model_copy(update={"model": model, "training": training})
    return run.model_copy(update={"megastable": changed})
