"""The flat list of a model's layers in numbers: their kinds, how many weights they hold, and what they cost.

``model.layers.gpt_layers`` builds the same list in torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache

from megastable.core.flops import BACKWARD_FORWARD_RATIO, ModelShape, Recomputation
from megastable.core.model_parts import ModelParts

SMALL_OPERATIONS = 10
"""Operations counted for each element of what is no matrix product (lookup, positions, norms, loss). The figure is
rough, and small beside the 2 x hidden operations that a product spends on each element."""


class LayerKind(Enum):
    """A kind of layer, by the name that its layers have in metrics, tables and error messages."""

    EMBEDDING = "embedding"
    EMBEDDING_FINISH = "embedding_finish"
    """Learned positions, the embedding's norm and dropout, each where configured."""
    BLOCK = "block"
    FINAL_NORM = "final_norm"
    HEAD = "head"

    def layer_name(self, number: int | None = None) -> str:
        """Return the name of a layer of this kind; ``number`` tells several of them apart, as in ``block_0``."""
        if number is None:
            return self.value
        return f"{self.value}_{number}"


@dataclass(frozen=True)
class StageLayers:
    """Which layers a pipeline stage holds: a number of blocks, and what it has of both ends of the model."""

    num_blocks: int
    is_first: bool
    """The stage holds the embedding, as the first stage and no other does."""
    has_embedding_finish: bool
    has_final_norm: bool
    is_last: bool
    """The stage holds the head, as the last stage and no other does."""

    @classmethod
    def of(cls, kinds: Iterable[LayerKind]) -> StageLayers:
        """Count the kinds of a stage's layers."""
        held = list(kinds)
        return cls(
            num_blocks=held.count(LayerKind.BLOCK),
            is_first=LayerKind.EMBEDDING in held,
            has_embedding_finish=LayerKind.EMBEDDING_FINISH in held,
            has_final_norm=LayerKind.FINAL_NORM in held,
            is_last=LayerKind.HEAD in held,
        )

    @classmethod
    def blocks(cls, count: int) -> StageLayers:
        """Make a stage in the middle of the model, which has ``count`` blocks and nothing else."""
        return cls(count, is_first=False, has_embedding_finish=False, has_final_norm=False, is_last=False)

    @classmethod
    def whole(cls, num_blocks: int) -> StageLayers:
        """Make the single stage of a model that is not cut."""
        return cls(num_blocks, is_first=True, has_embedding_finish=True, has_final_norm=True, is_last=True)


@dataclass(frozen=True)
class FlatLayer:
    """One layer of the model, by name and size."""

    name: str
    kind: LayerKind
    class_name: str
    """The class of its module in ``megastable.model``, which a cut by ``type:regex`` looks at."""
    num_parameters: int
    """Weights on one tensor rank; a tied head counts its own, as DeepSpeed counts them."""
    has_matrices: bool
    has_vectors: bool
    """It has weights of one dimension: norms or biases."""
    cost: int
    """Operations of a sample, forward and backward, over all tensor ranks."""


# A search over layouts, and every rule of a run file, asks for the same layers again.
@lru_cache(maxsize=64)
def flat_layers(
    shape: ModelShape, parts: ModelParts, recomputation: Recomputation, tensor_parallel_size: int = 1
) -> tuple[FlatLayer, ...]:
    """List the model's layers in order: embedding, embedding finish, blocks, final norm, head.

    The backward pass counts twice the forward pass, and what is computed again once more. The head multiplies by the
    padded vocabulary.
    """
    passes = 1 + BACKWARD_FORWARD_RATIO
    stream = shape.seq_length * shape.hidden_size  # elements of the residual stream of a sample
    logits = shape.seq_length * shape.padded_vocab_size
    stream_cost = SMALL_OPERATIONS * stream * passes
    finish_cost = stream_cost * (parts.positions.has_table + parts.embedding_norm)
    block_cost = passes * shape.block_forward_flops + recomputation.flops_per_sample(shape, 1, holds_head=False)
    head_cost = (2 * shape.hidden_size + SMALL_OPERATIONS) * logits * passes
    head_cost += recomputation.flops_per_sample(shape, 0, holds_head=True)
    head_class = "VocabularyEmbedding" if parts.tie_embeddings else "OutputHead"

    def layer(kind: LayerKind, class_name: str, cost: int, matrices: bool, vectors: bool) -> FlatLayer:
        weights = stage_parameters(shape, parts, StageLayers.of([kind]), tensor_parallel_size)
        return FlatLayer(kind.layer_name(), kind, class_name, weights, matrices, vectors, cost)

    block = layer(LayerKind.BLOCK, "TransformerBlock", block_cost, matrices=True, vectors=True)
    return (
        layer(LayerKind.EMBEDDING, "VocabularyEmbedding", stream_cost, matrices=True, vectors=False),
        layer(
            LayerKind.EMBEDDING_FINISH,
            "EmbeddingFinish",
            finish_cost,
            matrices=parts.positions.has_table,
            vectors=parts.embedding_norm,
        ),
        *(replace(block, name=LayerKind.BLOCK.layer_name(number)) for number in range(shape.num_layers)),
        layer(LayerKind.FINAL_NORM, "FinalNorm", stream_cost, matrices=False, vectors=True),
        layer(LayerKind.HEAD, head_class, head_cost, matrices=True, vectors=False),
    )


def describe_stage(layers: Sequence[FlatLayer]) -> str:
    """Tell people what a stage holds: ``embedding + 3 blocks``. A norm or finish goes without saying beside its end."""
    stage = StageLayers.of(layer.kind for layer in layers)
    shown = []
    if stage.is_first:
        shown.append("embedding")
    elif stage.has_embedding_finish:
        shown.append("embedding finish")
    if stage.num_blocks:
        plural = "s" if stage.num_blocks > 1 else ""
        shown.append(f"{stage.num_blocks} block{plural}")
    if stage.is_last:
        shown.append("head" if stage.has_final_norm else "head without its norm")
    elif stage.has_final_norm:
        shown.append("final norm")
    return " + ".join(shown)


def num_parameters(shape: ModelShape, parts: ModelParts) -> int:
    """Count all weights of the model: padded embedding, blocks with biases and norms, final norm, head."""
    return stage_parameters(shape, parts, StageLayers.whole(shape.num_layers))


def stage_parameters(shape: ModelShape, parts: ModelParts, stage: StageLayers, tensor_parallel_size: int = 1) -> int:
    """Count the weights that one tensor rank of a stage holds.

    A tied head is a copy of the embedding where it is on another stage. Norms, positions and the biases of row-parallel
    layers are whole on every rank (Shoeybi et al., arXiv 1909.08053, section 3).
    """
    norm = shape.hidden_size * parts.norm.num_vectors
    embedding = shape.padded_vocab_size * shape.hidden_size // tensor_parallel_size
    count = stage.num_blocks * _block_parameters(shape, parts, tensor_parallel_size)
    if stage.is_first:
        count += embedding
    if stage.has_embedding_finish and parts.positions.has_table:
        count += shape.seq_length * shape.hidden_size
    if stage.has_embedding_finish and parts.embedding_norm:
        count += norm
    if stage.has_final_norm:
        count += norm
    head_is_the_embedding = parts.tie_embeddings and stage.is_first
    if stage.is_last and not head_is_the_embedding:
        count += embedding
    return count


def largest_matrix(shape: ModelShape, stage: StageLayers, tensor_parallel_size: int = 1) -> int:
    """Count the elements of the largest single weight that one tensor rank of a stage holds."""
    sizes = [0]
    if stage.num_blocks:
        # All projections into a feed-forward layer are one weight, as a rule the largest of a block.
        sizes.append(shape.hidden_size * shape.ffn_input_size)
    if stage.is_first or stage.is_last:
        sizes.append(shape.hidden_size * shape.padded_vocab_size)
    return max(sizes) // tensor_parallel_size


def _block_parameters(shape: ModelShape, parts: ModelParts, tensor_parallel_size: int) -> int:
    hidden = shape.hidden_size
    fused_projection = hidden + 2 * shape.key_value_size
    split = hidden * fused_projection
    split += hidden * hidden  # the attention's output
    split += hidden * shape.ffn_input_size
    split += shape.ffn_hidden_size * hidden
    row_biases = 0
    if parts.linear_biases:
        split += fused_projection + shape.ffn_input_size  # column-parallel: the bias is split with the weight
        row_biases = 2 * hidden  # of the two outputs, whole on every rank
    normed_widths = 2 * hidden  # before attention and before the feed-forward layer
    if parts.qk_norm:
        normed_widths += 2 * shape.head_dim
    return split // tensor_parallel_size + row_biases + parts.norm.num_vectors * normed_widths
