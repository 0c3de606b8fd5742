"""The flat list of layers as DeepSpeed's PipelineModule, cut into stages by our own bounds."""

from __future__ import annotations

import contextlib
import os

import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import nn

from megastable.config import RunConfig
from megastable.config.stages import StageCut
from megastable.core.layout import ParallelLayout
from megastable.engine.tensor_group import ProcessTensorGroup, make_tensor_group, mark_split_parameters
from megastable.model.block import TransformerBlock
from megastable.model.layers import Layer, gpt_layers
from megastable.model.loss import token_mean_loss


class DrawnLayerSpec(LayerSpec):
    """A layer that draws its weights by its global index, the same on any layout."""

    def __init__(self, layer: Layer, run: RunConfig) -> None:
        super().__init__(layer.module_class)
        self._layer, self._run = layer, run

    def build(self, log: bool = False) -> nn.Module:
        """Allocate the layer with its weights drawn."""
        return self._layer.build(self._run)


class DrawnTiedLayerSpec(TiedLayerSpec):
    """The same for a layer whose module is shared under a key."""

    def __init__(self, layer: Layer, run: RunConfig) -> None:
        super().__init__(layer.tied_key, layer.module_class, forward_fn=layer.forward)
        self._layer, self._run = layer, run

    def build(self, log: bool = False) -> nn.Module:
        """Allocate the layer with its weights drawn."""
        return self._layer.build(self._run)


class GptPipeline(PipelineModule):
    """One rank's stage of the model.

    Attributes:
        parts: the stage bounds of the whole model.
        layer_names: of the whole model, in order.
        layer_kinds: of the same layers.
        first_layer: index in it of this stage's first layer.
    """

    def __init__(self, run: RunConfig, layout: ParallelLayout) -> None:
        tensor = make_tensor_group(layout, dist.get_rank(), run.megastable.tensor_parallel.sequence_parallel)
        settings = run.megastable
        self._bounds = list(StageCut.of(settings.model, settings.pipeline, settings.tensor_parallel).bounds)
        layers = gpt_layers(run, tensor)
        specs = [DrawnTiedLayerSpec(layer, run) if layer.tied_key else DrawnLayerSpec(layer, run) for layer in layers]
        with open(os.devnull, "w") as devnull, contextlib.redirect_stdout(devnull):  # it prints its own tables
            super().__init__(
                specs,
                topology=PipeModelDataParallelTopology(
                    num_pp=layout.num_stages, num_mp=layout.tensor_parallel_size, num_dp=layout.data_parallel_size
                ),
                loss_fn=token_mean_loss(
                    run.megastable.model.vocab_size,
                    tensor,
                    run.megastable.training.z_loss,
                    run.megastable.training.loss_chunk_tokens,
                ),
                checkpointable_layers=[TransformerBlock.__name__],
            )
        if isinstance(tensor, ProcessTensorGroup):
            tensor.connect(self._grid.get_slice_parallel_group())
        mark_split_parameters(self)
        self.layer_names = [layer.name for layer in layers]
        self.layer_kinds = [layer.kind for layer in layers]
        self.first_layer = self.parts[self._grid.get_stage_id()]

    def _synchronize_tied_weights(self) -> None:
        with torch.no_grad():  # a broadcast into a parameter is no part of the graph
            super()._synchronize_tied_weights()

    def _partition_layers(self, method: str = "") -> None:
        self.parts = self._bounds
        stage = self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])
