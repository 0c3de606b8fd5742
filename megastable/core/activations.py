"""Bytes that a stage keeps between a micro-batch's forward and backward pass, by the layers of ``megastable.model``.

The counting is that of Korthikanti et al., arXiv 2205.05198, section 4.1, on other layers. Theirs keep 34 bytes a token
and hidden unit in 16 bits, dropout masks included, and 5 for each attention weight. Here a block keeps, in elements a
token: the residual stream before each half (2 h), both norms' outputs (2 h), the fused projection, of which the values
are a part (h + 2 kv), scaled queries and keys (h + kv), the attention's output (h), and the inside of the feed-forward
layer (``FeedForwardKind.kept_per_width``: 2 f with GELU, 4 f with SwiGLU); with kv = h and f = 4 h that is 18 h. A
fused attention kernel keeps no attention weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megastable.core.flops import ATTENTION, BLOCK, FEED_FORWARD, ModelShape
from megastable.core.layers import StageLayers, largest_matrix
from megastable.core.memory import FP32_BYTES
from megastable.core.model_parts import ModelParts

INDEX_BYTES = 8


@dataclass(frozen=True)
class ActivationSettings:
    """What decides how much is kept, beside the sizes and parts of the model.

    Attributes:
        element_bytes: bytes of a number in the format of the weights, in which activations are.
        recomputed: kinds of ``core.flops.RECOMPUTED_KINDS``: only the input of a block, or of a half, is kept, and one
            of them at a time is computed again.
        loss_chunk_tokens: tokens whose logits stand at a time; None for all of a micro-batch.
        sequence_parallel: what lies between the half blocks is split over the tensor ranks.
        on_cpu: torch's CPU kernels run: masks are as wide as activations, attention with dropout keeps its weights, and
            16-bit attention runs in fp32.
        resets_at_documents: a micro-batch has a mask of its own, and rotary positions.
        fp32_sums_at_once: every weight's gradient is widened to fp32 as soon as it is there.
    """

    element_bytes: int
    recomputed: tuple[str, ...]
    loss_chunk_tokens: int | None = None
    tensor_parallel_size: int = 1
    sequence_parallel: bool = False
    dropout: bool = False
    attention_logit_cap: bool = False
    output_logit_cap: bool = False
    on_cpu: bool = False
    resets_at_documents: bool = False
    fp32_sums_at_once: bool = False

    @property
    def slices(self) -> int:
        """Return the number of parts into which the residual stream is cut."""
        return self.tensor_parallel_size if self.sequence_parallel else 1

    @property
    def rounded_bytes(self) -> int:
        """Return the bytes of a 16-bit copy of an fp32 value; 0 where all is fp32 and no copy is made."""
        return self.element_bytes if self.element_bytes < FP32_BYTES else 0

    @property
    def weight_gradient_bytes(self) -> int:
        """Return the bytes of one element of a weight's new gradient, on its way to the sum."""
        widened_copy = FP32_BYTES if self.fp32_sums_at_once else 0
        return self.element_bytes + widened_copy

    @property
    def mask_bytes(self) -> int:
        """Return the bytes of one element of a dropout mask; 0 without dropout."""
        if not self.dropout:
            return 0
        return self.element_bytes if self.on_cpu else 1


def activation_bytes(
    shape: ModelShape,
    parts: ModelParts,
    stage: StageLayers,
    settings: ActivationSettings,
    micro_batch_size: int,
    in_flight: int,
) -> float:
    """Compute the most bytes that stand on one tensor rank of a stage during a backward pass.

    They are what every micro-batch in flight has left on the stage, and what the pass itself works with where it works
    with most: in the loss, in the head, in a block or in the embedding.

    Args:
        in_flight: micro-batches that have passed forward and not yet backward; in 1F1B min(p - stage, m).
    """
    backward = _BackwardPass(shape, parts, stage, settings, micro_batch_size * shape.seq_length)
    standing = in_flight * backward.kept + (backward.capped_logits + backward.received_gradient)
    standing += backward.attention_bias_table
    return standing + max(backward.in_loss, backward.in_head, backward.in_block, backward.in_embedding)


@dataclass(frozen=True)
class _BackwardPass:
    """The backward pass of one micro-batch of ``tokens`` tokens on a stage, in the order in which it works."""

    shape: ModelShape
    parts: ModelParts
    stage: StageLayers
    settings: ActivationSettings
    tokens: int

    @property
    def kept(self) -> float:
        """Count the bytes that the micro-batch's forward pass has left."""
        of_token = _kept_per_token(self.shape, self.parts, self.stage, self.settings)
        if self.settings.resets_at_documents:
            of_token += _documents_of_token(self.shape, self.parts, self.stage, self.settings)
        return self.tokens * of_token

    @property
    def capped_logits(self) -> float:
        """Count the bytes of the copy of the logits that their cap keeps, of a chunk where the loss is in chunks."""
        if not self.settings.output_logit_cap:
            return 0.0
        return self._logits * self.settings.element_bytes

    @property
    def received_gradient(self) -> float:
        """Count the bytes where the next stage's gradient arrives; activations arrive where they stay, in ``kept``."""
        if self.stage.is_last:
            return 0.0
        return self.tokens * self.shape.hidden_size * self.settings.element_bytes / self.settings.slices

    @property
    def attention_bias_table(self) -> float:
        """Count the bytes of the table of attention biases for each head of the rank, which all blocks share."""
        if not self.parts.positions.bias_per_head:
            return 0.0
        heads = self.shape.num_attention_heads / self.settings.tensor_parallel_size
        return heads * self.shape.seq_length**2 * self.settings.element_bytes

    @property
    def in_loss(self) -> float:
        """Count the bytes of the probabilities and their gradient, both in fp32, and of its rounding to 16 bits."""
        return self._head_gradient_of_chunks_before + self._logits * (2 * FP32_BYTES + self.settings.rounded_bytes)

    @property
    def in_head(self) -> float:
        """Count the bytes of the logits' gradient beside the gradient of the head's weight."""
        if not self.stage.is_last:
            return 0.0
        size = self.settings.element_bytes
        # The new gradient is first added to that of the chunks before, and the sum is then widened to fp32.
        added = self._head_gradient_of_chunks_before + self._embedding * size
        widened = self._embedding * self.settings.weight_gradient_bytes
        return self._logits * size + max(added, widened)

    @property
    def in_block(self) -> float:
        """Count the bytes of what a block computes again, and of the gradients around its feed-forward layer."""
        held = 0.0
        if self.stage.num_blocks:
            held = self.tokens * _again_per_token(self.shape, self.parts, self.settings) + self._at_feed_forward
        if self._tied_on_this_stage:
            # The head's share of the gradient waits through all blocks for the embedding's, which comes last.
            held += self._embedding * self.settings.element_bytes
        return held

    @property
    def in_embedding(self) -> float:
        """Count the bytes of the embedding's gradient, less those that the micro-batch has freed by then."""
        if not self.stage.is_first:
            return 0.0
        of_weight = self.settings.weight_gradient_bytes
        if self._tied_on_this_stage:
            of_weight += 2 * self.settings.element_bytes  # both shares, while autograd adds them to a third tensor
        return self._embedding * of_weight - self.kept

    @property
    def _chunk_tokens(self) -> int:
        return min(self.tokens, self.settings.loss_chunk_tokens or self.tokens)

    @property
    def _logits(self) -> float:
        """Count the logits that stand at a time on a rank of the last stage."""
        if not self.stage.is_last:
            return 0.0
        return self._chunk_tokens * self.shape.padded_vocab_size / self.settings.tensor_parallel_size

    @property
    def _embedding(self) -> float:
        """Count the elements of a rank's part of the embedding, which are as many as of the head."""
        return self.shape.padded_vocab_size * self.shape.hidden_size / self.settings.tensor_parallel_size

    @property
    def _head_gradient_of_chunks_before(self) -> float:
        """Count the bytes of the gradient of the head's weight that earlier chunks of the micro-batch have left."""
        in_chunks = self._chunk_tokens < self.tokens
        if not (self.stage.is_last and in_chunks):
            return 0.0
        return self._embedding * self.settings.element_bytes

    @property
    def _tied_on_this_stage(self) -> bool:
        return self.stage.is_first and self.stage.is_last and self.parts.tie_embeddings

    @property
    def _at_feed_forward(self) -> float:
        """Count the bytes of gradients around and inside a feed-forward layer, and of its largest weight's."""
        settings = self.settings
        both_sides = 2 * self.shape.hidden_size / settings.slices
        inside = self.shape.kept_ffn_size / settings.tensor_parallel_size
        of_weight = largest_matrix(self.shape, StageLayers.blocks(1), settings.tensor_parallel_size)
        return self.tokens * settings.element_bytes * (both_sides + inside) + of_weight * settings.weight_gradient_bytes


def _kept_per_token(shape: ModelShape, parts: ModelParts, stage: StageLayers, settings: ActivationSettings) -> float:
    """Compute the bytes that a micro-batch in flight has left on a stage for each of its tokens."""
    stream = shape.hidden_size * settings.element_bytes / settings.slices
    kept = stage.num_blocks * _kept_by_block(shape, parts, settings)
    if stage.has_embedding_finish:
        if parts.embedding_norm:
            kept += stream  # the norm's input
        kept += shape.hidden_size * settings.mask_bytes / settings.slices
    # Every stage keeps its last layer's output (or the head's input), and the final norm its own input.
    return kept + stream * (1 + stage.has_final_norm)


def _documents_of_token(
    shape: ModelShape, parts: ModelParts, stage: StageLayers, settings: ActivationSettings
) -> float:
    """Compute the bytes of one token in what all blocks of a stage share of a micro-batch that is packed with reset."""
    kept = 2.0 * INDEX_BYTES  # its place, and where its document begins
    if not stage.num_blocks:
        return kept
    heads = shape.num_attention_heads / settings.tensor_parallel_size if parts.positions.bias_per_head else 1
    # The bias stands in fp32 wherever the scores do.
    in_fp32 = settings.on_cpu or parts.attention.keeps_weights
    kept += heads * shape.seq_length * (FP32_BYTES if in_fp32 else settings.element_bytes)
    if parts.positions.needs_even_head_dim:
        kept += shape.head_dim * FP32_BYTES  # a cosine and a sine for each pair of channels
    return kept


def _kept_by_block(shape: ModelShape, parts: ModelParts, settings: ActivationSettings) -> float:
    """Compute the bytes that a block keeps of one token from its forward to its backward pass."""
    stream = shape.hidden_size * settings.element_bytes / settings.slices
    if BLOCK in settings.recomputed:
        return stream
    whole = [kept(shape, parts, settings) for half, kept in HALF_BYTES.items() if half not in settings.recomputed]
    return sum(whole) + stream * len(settings.recomputed) - _shared_input(shape, parts, settings)


def _again_per_token(shape: ModelShape, parts: ModelParts, settings: ActivationSettings) -> float:
    """Compute the bytes that stand of one token while a part of a block is computed again."""
    if BLOCK in settings.recomputed:
        return block_bytes_per_token(shape, parts, settings)
    return max((HALF_BYTES[half](shape, parts, settings) for half in settings.recomputed), default=0.0)


def block_bytes_per_token(shape: ModelShape, parts: ModelParts, settings: ActivationSettings) -> float:
    """Compute the bytes that one block keeps of one token without recomputation."""
    whole = sum(kept(shape, parts, settings) for kept in HALF_BYTES.values())
    return whole - _shared_input(shape, parts, settings)


def _shared_input(shape: ModelShape, parts: ModelParts, settings: ActivationSettings) -> float:
    """Compute the bytes of one token's input that both halves of a block keep, and that stands once."""
    if not parts.parallel_residual:
        return 0.0
    return shape.hidden_size * settings.element_bytes / settings.slices


def _attention_half(shape: ModelShape, parts: ModelParts, settings: ActivationSettings) -> float:
    inside = _attention_bytes(shape, parts, settings)
    return _beside_a_half(shape, parts, settings) + inside / settings.tensor_parallel_size


def _feed_forward_half(shape: ModelShape, parts: ModelParts, settings: ActivationSettings) -> float:
    inside = shape.kept_ffn_size * settings.element_bytes
    return _beside_a_half(shape, parts, settings) + inside / settings.tensor_parallel_size


HALF_BYTES: dict[str, Callable[[ModelShape, ModelParts, ActivationSettings], float]] = {
    ATTENTION: _attention_half,
    FEED_FORWARD: _feed_forward_half,
}
"""Half of a block -> the bytes that it keeps of one token without recomputation."""


def _beside_a_half(shape: ModelShape, parts: ModelParts, settings: ActivationSettings) -> float:
    """Compute the bytes of a half's input, its norm's output and its mask: whole on every rank unless sliced."""
    streams = 2
    if parts.norm.keeps_normed_values(settings.on_cpu):
        streams += 1
    return shape.hidden_size * (streams * settings.element_bytes + settings.mask_bytes) / settings.slices


def _attention_bytes(shape: ModelShape, parts: ModelParts, settings: ActivationSettings) -> float:
    """Compute the bytes of one token over all heads, from the projection to the input of the output layer."""
    hidden = shape.hidden_size
    size = settings.element_bytes
    fused_projection = hidden + 2 * shape.key_value_size
    widened = settings.on_cpu and size < FP32_BYTES and not parts.attention.keeps_weights
    # torch has no fused kernel with dropout for a CPU.
    plain = parts.attention.keeps_weights or (settings.on_cpu and settings.dropout)
    kept = float(hidden * size)  # the input of the output layer
    if parts.qk_norm:
        # The norm of the queries keeps a copy of them; that of the keys keeps the fused projection that they are a view
        # of. The values are a view of it as well, so it counts here only where they are copied further down.
        kept += hidden * size
        if widened or plain:
            kept += fused_projection * size
    if plain:  # queries, keys and values are copied, keys and values once for every query head
        attended_size = FP32_BYTES if widened else size
        return kept + 3 * hidden * attended_size + _attention_weights(shape, settings, attended_size)
    if widened:  # fp32 copies of what goes into the kernel, and its fp32 output
        kept += (hidden + fused_projection) * FP32_BYTES
    else:  # the projection, of which the values are a view, and the scaled queries and keys
        kept += (fused_projection + hidden + shape.key_value_size) * size
    return kept + FP32_BYTES * shape.num_attention_heads  # the log-sums of the fused kernel


def _attention_weights(shape: ModelShape, settings: ActivationSettings, size: int) -> float:
    """Compute the bytes of one token's attention weights, values of ``size`` bytes, and of what is made of them."""
    of_each = FP32_BYTES  # the softmax
    if size < FP32_BYTES:
        of_each += size  # its rounding, which is multiplied by the values
    if settings.dropout:
        of_each += size + (size if settings.on_cpu else 1)  # what dropout leaves, and its mask
    if settings.attention_logit_cap:
        of_each += FP32_BYTES  # the tanh
    return shape.num_attention_heads * shape.seq_length * of_each
