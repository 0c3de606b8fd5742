"""The GPT as a flat list of layers, from token ids to logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from megastable.config import RunConfig
from megastable.model.block import TransformerBlock
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
from megastable.model.positions import AttentionBias, RotaryTable
from megastable.model.tensor_parallel import TensorGroup

EMBEDDING_KEY = "embedding"


@dataclass(frozen=True)
class Layer:
    """One entry of the flat list; nothing is allocated until ``build``."""

    name: str
    """For people: ``embedding``, ``block_0``, ``head`` …"""
    module_class: type[nn.Module]
    arguments: tuple[Any, ...]
    draw_index: int
    """Global index that seeds the weights; a tied layer has that of the first layer it is tied to."""
    tied_key: str | None = None
    """Layers with the same key are one module (one copy a stage)."""
    forward: Callable[[Any, Tensor], Tensor | HeadInput] | None = None
    """Replaces the module's own forward."""

    def build(self, run: RunConfig) -> nn.Module:
        """Allocate the layer and draw its weights."""
        module = self.module_class(*self.arguments)
        draw_weights(module, self.draw_index, run)
        return module


def gpt_layers(run: RunConfig, tensor: TensorGroup) -> list[Layer]:
    """The model's layers in order.

    A single tensor passes between neighbours: token ids (batch, seq) in, hidden states (batch, seq, hidden) between,
    logits (batch, seq, padded vocabulary) out. Over tensor ranks the hidden states are whole, or slices of the sequence
    under sequence parallelism, and each rank has the logits of its share of the vocabulary. With a loss in chunks the
    last layer hands on a ``HeadInput`` in place of logits.
    """
    model, in_chunks = run.megastable.model, run.megastable.training.loss_chunk_tokens is not None
    bias = AttentionBias(model.num_attention_heads if model.position_embedding == "alibi" else None, tensor)
    rotary = RotaryTable(model.head_dim, model.rotary_base) if model.position_embedding == "rotary" else None
    tied_key = EMBEDDING_KEY if model.tie_embeddings else None

    layers = [
        Layer("embedding", VocabularyEmbedding, (model, tensor), draw_index=0, tied_key=tied_key),
        Layer("embedding_finish", EmbeddingFinish, (model, tensor), draw_index=1),
    ]
    for number in range(model.num_layers):
        arguments = (model, bias, rotary, tensor, run.megastable.pipeline.recomputed_kinds)
        layers.append(Layer(f"block_{number}", TransformerBlock, arguments, draw_index=len(layers)))
    layers.append(Layer("final_norm", FinalNorm, (model,), draw_index=len(layers)))
    if model.tie_embeddings:
        forward = tied_head_input if in_chunks else tied_logits
        layers.append(Layer("head", VocabularyEmbedding, (model, tensor), 0, tied_key=tied_key, forward=forward))
    else:
        layers.append(Layer("head", OutputHead, (model, tensor, in_chunks), draw_index=len(layers)))
    return layers
