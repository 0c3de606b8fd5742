"""The number of weights of a model, of one of its stages, and of one tensor rank of a stage, by sizes alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megastable.core.flops import ModelShape


@dataclass(frozen=True)
class ModelParts:
    """What a model is made of, beside its sizes."""

    tie_embeddings: bool
    learned_positions: bool
    embedding_norm: bool
    norm_has_bias: bool
    qk_norm: bool

    @property
    def vectors_per_norm(self) -> int:
        """A scale, and a bias where it has one."""
        return 2 if self.norm_has_bias else 1


@dataclass(frozen=True)
class StageLayers:
    """Which layers a pipeline stage holds: so many blocks, and what it has of both ends of the model."""

    num_blocks: int
    is_first: bool
    """It holds the embedding, as the first stage and no other does."""
    has_embedding_finish: bool
    has_final_norm: bool
    is_last: bool
    """It holds the head, as the last stage and no other does."""

    @classmethod
    def of(cls, names: Sequence[str]) -> StageLayers:
        """Of the names of its layers."""
        return cls(
            num_blocks=sum(name.startswith("block_") for name in names),
            is_first="embedding" in names,
            has_embedding_finish="embedding_finish" in names,
            has_final_norm="final_norm" in names,
            is_last="head" in names,
        )

    @classmethod
    def blocks(cls, count: int) -> StageLayers:
        """Blocks alone."""
        return cls(count, is_first=False, has_embedding_finish=False, has_final_norm=False, is_last=False)

    @classmethod
    def whole(cls, num_blocks: int) -> StageLayers:
        """A model of one stage."""
        return cls(num_blocks, is_first=True, has_embedding_finish=True, has_final_norm=True, is_last=True)


def num_parameters(shape: ModelShape, parts: ModelParts) -> int:
    """All weights of the model: padded embedding, blocks with biases and norms, final norm, head."""
    return stage_parameters(shape, parts, StageLayers.whole(shape.num_layers))


def stage_parameters(shape: ModelShape, parts: ModelParts, stage: StageLayers, tensor_parallel_size: int = 1) -> int:
    """Weights that one tensor rank of a stage holds.

    A tied head is a copy of the embedding where it is on another stage. Norms, positions and the biases of row-parallel
    layers are whole on every rank (Shoeybi et al., arXiv 1909.08053, section 3).
    """
    hidden = shape.hidden_size
    norm = hidden * parts.vectors_per_norm
    embedding = shape.padded_vocab_size * hidden // tensor_parallel_size
    count = stage.num_blocks * _block_parameters(shape, parts, tensor_parallel_size)
    if stage.is_first:
        count += embedding
    if stage.has_embedding_finish:
        count += shape.seq_length * hidden if parts.learned_positions else 0
        count += norm if parts.embedding_norm else 0
    count += norm if stage.has_final_norm else 0
    if stage.is_last:
        count += 0 if stage.is_first and parts.tie_embeddings else embedding
    return count


def largest_matrix(shape: ModelShape, stage: StageLayers, tensor_parallel_size: int = 1) -> int:
    """Elements of the largest single weight that one tensor rank of a stage holds."""
    ffn_input = shape.hidden_size * shape.ffn_hidden_size * (2 if shape.gated_ffn else 1) if stage.num_blocks else 0
    embedding = shape.hidden_size * shape.padded_vocab_size if stage.is_first or stage.is_last else 0
    return max(ffn_input, embedding) // tensor_parallel_size


def _block_parameters(shape: ModelShape, parts: ModelParts, tensor_parallel_size: int) -> int:
    hidden, head_dim = shape.hidden_size, shape.hidden_size // shape.num_attention_heads
    norms = parts.vectors_per_norm * (2 * hidden + (2 * head_dim if parts.qk_norm else 0))
    key_value_size = 2 * head_dim * shape.num_key_value_heads
    ffn_inputs = shape.ffn_hidden_size * (2 if shape.gated_ffn else 1)
    attention = hidden * (2 * hidden + key_value_size) + (hidden + key_value_size)
    feed_forward = hidden * (ffn_inputs + shape.ffn_hidden_size) + ffn_inputs
    return (attention + feed_forward) // tensor_parallel_size + 2 * hidden + norms
