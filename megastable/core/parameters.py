"""The number of weights of a model, of one of its stages, and of one tensor rank of a stage, by sizes alone."""

from __future__ import annotations

from dataclasses import dataclass

from megastable.core.flops import ModelShape


@dataclass(frozen=True)
class ModelParts:
    """What a model is made of, beside its sizes."""

    tie_embeddings: bool
    learned_positions: bool
    embedding_norm: bool
    norm_has_bias: bool


@dataclass(frozen=True)
class StageLayers:
    """Which layers a pipeline stage holds: so many blocks, and the embedding or the final norm and head at the ends."""

    num_blocks: int
    is_first: bool
    is_last: bool


def num_parameters(
    shape: ModelShape, *, tie_embeddings: bool, learned_positions: bool, embedding_norm: bool, norm_has_bias: bool
) -> int:
    """All weights of the model: padded embedding, blocks with biases and norms, final norm, head.

    The two small vectors of a norm over queries and keys are left out.
    """
    parts = ModelParts(tie_embeddings, learned_positions, embedding_norm, norm_has_bias)
    return stage_parameters(shape, parts, StageLayers(shape.num_layers, is_first=True, is_last=True))


def stage_parameters(shape: ModelShape, parts: ModelParts, stage: StageLayers, tensor_parallel_size: int = 1) -> int:
    """Weights that one tensor rank of a stage holds.

    A tied head is a copy of the embedding where it is on another stage. Norms, positions and the biases of row-parallel
    layers are whole on every rank (Shoeybi et al., arXiv 1909.08053, section 3).
    """
    hidden = shape.hidden_size
    norm = hidden * (2 if parts.norm_has_bias else 1)
    embedding = shape.padded_vocab_size * hidden // tensor_parallel_size
    count = stage.num_blocks * _block_parameters(shape, norm, tensor_parallel_size)
    if stage.is_first:
        count += embedding
        count += shape.seq_length * hidden if parts.learned_positions else 0
        count += norm if parts.embedding_norm else 0
    if stage.is_last:
        count += norm
        count += 0 if stage.is_first and parts.tie_embeddings else embedding
    return count


def largest_matrix(shape: ModelShape, stage: StageLayers, tensor_parallel_size: int = 1) -> int:
    """Elements of the largest single weight that one tensor rank of a stage holds."""
    ffn_input = shape.hidden_size * shape.ffn_hidden_size * (2 if shape.gated_ffn else 1)
    embedding = shape.hidden_size * shape.padded_vocab_size if stage.is_first or stage.is_last else 0
    return max(ffn_input, embedding) // tensor_parallel_size


def _block_parameters(shape: ModelShape, norm: int, tensor_parallel_size: int) -> int:
    hidden = shape.hidden_size
    key_value_size = 2 * (hidden // shape.num_attention_heads * shape.num_key_value_heads)
    ffn_inputs = shape.ffn_hidden_size * (2 if shape.gated_ffn else 1)
    attention = hidden * (2 * hidden + key_value_size) + (hidden + key_value_size)
    feed_forward = hidden * (ffn_inputs + shape.ffn_hidden_size) + ffn_inputs
    return (attention + feed_forward) // tensor_parallel_size + 2 * hidden + 2 * norm
