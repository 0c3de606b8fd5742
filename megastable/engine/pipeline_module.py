"""One rank's stage of the model: the flat list of layers as DeepSpeed's PipelineModule, cut by our own bounds.

Its blocks can be compiled. torch's compiler takes seconds to import, which only a compiled run should pay.
"""

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
from megastable.engine.progress import Progress
from megastable.engine.tensor_group import ProcessTensorGroup, make_tensor_group, mark_split_parameters
from megastable.model.block import TransformerBlock
from megastable.model.documents import DocumentScope
from megastable.model.layers import Layer, gpt_layers
from megastable.model.loss import token_mean_loss

BACKEND = "inductor"
RECOMPILE_LIMIT = 64
"""Compiled forms that one function may have. All blocks share theirs: one for every micro-batch size in training, and
one in evaluation. Past torch's own limit of 8 a block runs uncompiled without a word."""


class DrawnLayerSpec(LayerSpec):
    """A layer that draws its weights by its global index, so that they are the same on any layout."""

    def __init__(self, layer: Layer, run: RunConfig) -> None:
        super().__init__(layer.module_class)
        self._layer = layer
        self._run = run

    def build(self, log: bool = False) -> nn.Module:
        """Build the layer with its weights drawn; called for the layers of this rank's stage alone."""
        return self._layer.build(self._run)


class DrawnTiedLayerSpec(TiedLayerSpec):
    """A ``DrawnLayerSpec`` for a layer whose module is shared under a key by several places in the list."""

    def __init__(self, layer: Layer, run: RunConfig) -> None:
        super().__init__(layer.tied_key, layer.module_class, forward_fn=layer.forward)
        self._layer = layer
        self._run = run

    def build(self, log: bool = False) -> nn.Module:
        """Build the layer with its weights drawn; called for the layers of this rank's stage alone."""
        return self._layer.build(self._run)


class GptPipeline(PipelineModule):
    """The stage of the model that this rank holds, as DeepSpeed's engine takes it.

    Attributes:
        parts: the stage bounds of the whole model: stage ``n`` has the layers from ``parts[n]`` to ``parts[n + 1]``.
        layer_names: the names of all layers of the model, in order.
        layer_kinds: the kinds of the same layers.
        first_layer: index of this stage's first layer in them.
        documents: which documents of a packed micro-batch the layers read.
    """

    def __init__(self, run: RunConfig, layout: ParallelLayout) -> None:
        settings = run.megastable
        tensor = make_tensor_group(layout, dist.get_rank(), settings.tensor_parallel.sequence_parallel)
        # DeepSpeed's constructor calls ``_partition_layers``, which reads them.
        self._bounds = list(StageCut.of(settings.model, settings.pipeline, settings.tensor_parallel).bounds)
        documents = DocumentScope()
        layers = gpt_layers(run, tensor, documents)
        specs = [DrawnTiedLayerSpec(layer, run) if layer.tied_key else DrawnLayerSpec(layer, run) for layer in layers]
        # The constructor prints its seed, the topology and the tied weights.
        with open(os.devnull, "w") as devnull, contextlib.redirect_stdout(devnull):
            super().__init__(
                specs,
                topology=PipeModelDataParallelTopology(
                    num_pp=layout.num_stages, num_mp=layout.tensor_parallel_size, num_dp=layout.data_parallel_size
                ),
                loss_fn=token_mean_loss(
                    settings.model.vocab_size, tensor, settings.training.z_loss, settings.training.loss_chunk_tokens
                ),
                checkpointable_layers=[TransformerBlock.__name__],
            )
        # The process groups were made by that constructor, and its layers were built before they existed.
        if isinstance(tensor, ProcessTensorGroup):
            tensor.connect(self._grid.get_slice_parallel_group())
        mark_split_parameters(self)
        self.documents = documents
        self.layer_names = [layer.name for layer in layers]
        self.layer_kinds = [layer.kind for layer in layers]
        self.first_layer = self.parts[self._grid.get_stage_id()]

    def parameter_names(self) -> dict[nn.Parameter, str]:
        """Map this rank's parameters to their names in the whole model, which begin with that of their layer."""
        return {parameter: self._whole_name(name) for name, parameter in self.named_parameters()}

    def module_names(self) -> dict[nn.Module, str]:
        """Map the modules of this rank's stage to their names in the whole model, layers first and what is in them."""
        names = {name: module for name, module in self.named_modules() if name not in ("", "tied_modules")}
        return {module: self._whole_name(name) for name, module in names.items()}

    def _whole_name(self, name: str) -> str:
        first, dot, rest = name.partition(".")
        if first == "tied_modules":  # the name goes on with the key of the tied layers, which is that of the first
            return rest
        return f"{self.layer_names[int(first)]}{dot}{rest}"

    def _synchronize_tied_weights(self) -> None:
        # A broadcast into a parameter would otherwise become part of the graph of its first backward pass.
        with torch.no_grad():
            super()._synchronize_tied_weights()

    def _partition_layers(self, method: str = "") -> None:
        # DeepSpeed's own methods know nothing of our bounds, and the default builds the whole model on every rank to
        # count its parameters.
        self.parts = self._bounds
        stage = self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])


def compile_blocks(module: GptPipeline, run: RunConfig) -> None:
    """Compile every block of this rank in place, on its first pass; names of parameters stay as they are."""
    blocks = [layer for layer in module.forward_funcs if isinstance(layer, TransformerBlock)]
    if not blocks:
        return
    import torch._dynamo

    torch._dynamo.config.recompile_limit = max(RECOMPILE_LIMIT, torch._dynamo.config.recompile_limit)
    _make_tables(blocks[0], run)
    for block in blocks:
        # A form for each size: by default torch would compile one for all sizes when it meets the second.
        block.compile(backend=BACKEND, dynamic=False)


def mark_compilation(progress: Progress) -> None:
    """Note each time in which this process compiles, which may take minutes, as work at length.

    It happens inside of passes: for the first micro-batch, each new size of one, and the first evaluation.
    """
    from torch._dynamo.callback import on_compile_end, on_compile_start

    on_compile_start(lambda _: progress.begin_at_length("compiling"))
    on_compile_end(lambda _: progress.end_at_length())


def _make_tables(block: TransformerBlock, run: RunConfig) -> None:
    """Let rotary tables and attention bias be made: a first pass that makes them would be compiled for itself."""
    model = run.megastable.model
    weight = next(block.parameters())
    with torch.no_grad():
        block(weight.new_zeros(1, model.seq_length, model.hidden_size))  # (batch, seq, hidden)


def uncompiled() -> contextlib.AbstractContextManager[object]:
    """Return a context in which compiled blocks run as written, so that hooks inside them are called."""
    return torch.compiler.set_stance("force_eager")
