"""The GPT as a flat list of layers, from token ids to logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from megastable.config import RunConfig
from megastable.core.layers import LayerKind
from megastable.model.block import TransformerBlock
from megastable.model.documents import DocumentScope
from megastable.model.ends import (
    EmbeddingFinish,
    FinalNorm,
    HeadInput,
    OutputHead,
    VocabularyEmbedding,
    tied_head_input,
    tied_logits,
)
from megastable.model.initialise import draw_weights
from megastable.model.positions import POSITION_EMBEDDINGS
from megastable.model.tensor_parallel import TensorGroup

EMBEDDING_KEY = "embedding"
"""The key under which embedding and tied head are one module, which stands in the names of its weights."""


@dataclass(frozen=True)
class Layer:
    """One entry of the flat list; nothing is allocated until ``build``."""

    kind: LayerKind
    module_class: type[nn.Module]
    arguments: tuple[Any, ...]
    draw_index: int
    """Global index that seeds the weights; a tied layer has that of the first layer it is tied to."""
    tied_key: str | None = None
    """Layers with the same key are one module (one copy a stage)."""
    forward: Callable[[Any, Tensor], Tensor | HeadInput] | None = None
    """Replaces the module's own forward."""
    block_number: int | None = None
    """The place of a block among the blocks."""

    @property
    def name(self) -> str:
        """Return the name for people: ``embedding``, ``block_0``, ``head`` …"""
        return self.kind.layer_name(self.block_number)

    def build(self, run: RunConfig) -> nn.Module:
        """Allocate the layer and draw its weights."""
        module = self.module_class(*self.arguments)
        draw_weights(module, self.draw_index, run)
        return module


def gpt_layers(run: RunConfig, tensor: TensorGroup, documents: DocumentScope | None = None) -> list[Layer]:
    """List the model's layers in order; ``core.layers.flat_layers`` is the same list in numbers.

    A single tensor passes between neighbours: token ids (batch, seq) in, hidden states (batch, seq, hidden) between,
    logits (batch, seq, padded vocabulary) out. Over tensor ranks the hidden states are whole, or slices of the sequence
    under sequence parallelism, and each rank has the logits of its share of the vocabulary. With a loss in chunks the
    last layer hands on a ``HeadInput`` in place of logits.

    Args:
        documents: by which the layers read packed micro-batches; None where every sample is read as one text.
    """
    model = run.megastable.model
    # One object for all blocks, which then share its tables.
    positions = POSITION_EMBEDDINGS[model.position_embedding](model, tensor)
    positions.documents = documents or positions.documents
    tied_key = EMBEDDING_KEY if model.tie_embeddings else None
    in_chunks = run.megastable.training.loss_chunk_tokens is not None

    layers = [
        Layer(LayerKind.EMBEDDING, VocabularyEmbedding, (model, tensor), draw_index=0, tied_key=tied_key),
        Layer(LayerKind.EMBEDDING_FINISH, EmbeddingFinish, (model, positions, tensor), draw_index=1),
    ]
    for number in range(model.num_layers):
        arguments = (model, positions, tensor, run.megastable.pipeline.recomputed_kinds)
        block = Layer(LayerKind.BLOCK, TransformerBlock, arguments, draw_index=len(layers), block_number=number)
        layers.append(block)
    layers.append(Layer(LayerKind.FINAL_NORM, FinalNorm, (model,), draw_index=len(layers)))
    if model.tie_embeddings:
        # The head is the embedding once more, seeded alike, so that a copy on another stage starts with its weights.
        forward = tied_head_input if in_chunks else tied_logits
        layers.append(replace(layers[0], kind=LayerKind.HEAD, forward=forward))
    else:
        layers.append(Layer(LayerKind.HEAD, OutputHead, (model, tensor, in_chunks), draw_index=len(layers)))
    return layers
