"""Bytes that a stage keeps between a micro-batch's forward and backward pass, by the layers of ``megastable.model``.

The counting is that of Korthikanti et al., arXiv 2205.05198, section 4.1, on other layers. Theirs keep 34 bytes a token
and hidden unit in 16 bits, dropout masks included, and 5 for each attention weight. Here a block keeps, in elements a
token: the residual stream before each half (2 h), both norms' outputs (2 h), the fused projection, of which the values
are a part (h + 2 kv), scaled queries and keys (h + kv), the attention's output (h), and the inside of the feed-forward
layer (2 f with GELU, 4 f with SwiGLU); with kv = h and f = 4 h that is 18 h. A fused attention kernel keeps no
attention weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megastable.core.flops import ATTENTION, BLOCK, FEED_FORWARD, ModelShape
from megastable.core.model_parts import ModelParts, StageLayers, largest_matrix

FP32_BYTES = 4


@dataclass(frozen=True)
class ActivationSettings:
    """What decides how much is kept beside the sizes.

    Attributes:
        element_bytes: of the format of the weights, in which activations are.
        recomputed: kinds of ``core.recomputation``: only the input of a block, or of a half, is kept, and one at a time
            is computed again.
        loss_chunk_tokens: tokens whose logits stand at a time; None for all of a micro-batch.
        sequence_parallel: what lies between the half blocks is split over the tensor ranks.
        on_cpu: torch's CPU kernels: masks are as wide as activations, attention with dropout keeps its weights, and
            16-bit attention runs in fp32.
        math_attention: the backend that keeps attention weights.
        attention_bias_heads: heads of the table of ALiBi's penalties, 0 without one.
        plain_rms_norm: RMSNorm on a CPU, where torch has no fused kernel, keeps the normed values beside its input.
        fp32_sums_at_once: every weight's gradient is widened to fp32 as soon as it is there.
    """

    element_bytes: int
    recomputed: tuple[str, ...]
    loss_chunk_tokens: int | None = None
    tensor_parallel_size: int = 1
    sequence_parallel: bool = False
    dropout: bool = False
    qk_norm: bool = False
    attention_logit_cap: bool = False
    output_logit_cap: bool = False
    on_cpu: bool = False
    math_attention: bool = False
    attention_bias_heads: int = 0
    plain_rms_norm: bool = False
    fp32_sums_at_once: bool = False

    @property
    def slices(self) -> int:
        """Parts into which the residual stream is cut."""
        return self.tensor_parallel_size if self.sequence_parallel else 1

    @property
    def rounded_bytes(self) -> int:
        """Of a 16-bit copy of an fp32 value; 0 where all is fp32."""
        return self.element_bytes if self.element_bytes < FP32_BYTES else 0

    @property
    def weight_gradient_bytes(self) -> int:
        """Of an element of a weight's new gradient, on its way to the sum."""
        return self.element_bytes + (FP32_BYTES if self.fp32_sums_at_once else 0)

    @property
    def mask_bytes(self) -> int:
        """Of one element of a dropout mask; 0 without dropout."""
        return (self.element_bytes if self.on_cpu else 1) if self.dropout else 0


def activation_bytes(
    shape: ModelShape,
    parts: ModelParts,
    stage: StageLayers,
    settings: ActivationSettings,
    micro_batch_size: int,
    in_flight: int,
) -> float:
    """The most that stands on one tensor rank of a stage during a backward pass.

    That is what every micro-batch in flight has left, and what the pass itself works with.

    Args:
        in_flight: micro-batches that have passed forward and not yet backward; in 1F1B min(p - stage, m).
    """
    tokens, ranks = micro_batch_size * shape.seq_length, settings.tensor_parallel_size
    kept = tokens * _kept_per_token(shape, parts, stage, settings)
    again = tokens * _again_per_token(shape, settings)
    chunk_tokens = min(tokens, settings.loss_chunk_tokens or tokens)
    logits = chunk_tokens * shape.padded_vocab_size / ranks if stage.is_last else 0.0
    embedding = shape.padded_vocab_size * shape.hidden_size / ranks
    shared = stage.is_first and stage.is_last and parts.tie_embeddings
    size, gradient = settings.element_bytes, settings.weight_gradient_bytes

    # The head's gradient from the chunks before.
    summed = embedding * size if stage.is_last and chunk_tokens < tokens else 0.0
    in_loss = summed + logits * (2 * FP32_BYTES + settings.rounded_bytes)  # the probabilities and their gradient
    in_head = logits * size + (max(summed + embedding * size, embedding * gradient) if stage.is_last else 0.0)
    in_block = again + _working_in_block(shape, settings, tokens) if stage.num_blocks else 0.0
    if shared:  # the head's share of a tied gradient waits for the embedding's, which comes last
        in_block += embedding * size
    # By then the micro-batch has left nothing else.
    in_embedding = embedding * (2 * size + gradient if shared else gradient) - kept if stage.is_first else 0.0
    always = _capped(shape, stage, settings, chunk_tokens) + _received(shape, stage, settings, tokens)
    table = settings.attention_bias_heads / ranks * shape.seq_length**2 * size
    return in_flight * kept + always + table + max(in_loss, in_head, in_block, in_embedding)


def _capped(shape: ModelShape, stage: StageLayers, settings: ActivationSettings, tokens: int) -> float:
    """A cap keeps a copy of the logits, of one chunk of them where the loss is in chunks."""
    if not (stage.is_last and settings.output_logit_cap):
        return 0.0
    return tokens * settings.element_bytes * shape.padded_vocab_size / settings.tensor_parallel_size


def _received(shape: ModelShape, stage: StageLayers, settings: ActivationSettings, tokens: int) -> float:
    """Where gradients of the next stage arrive; activations arrive where they stay."""
    return 0.0 if stage.is_last else tokens * shape.hidden_size * settings.element_bytes / settings.slices


def block_bytes_per_token(shape: ModelShape, settings: ActivationSettings) -> float:
    """What one block keeps of one token without recomputation."""
    return sum(kept(shape, settings) for kept in HALF_BYTES.values())


def _attention_half(shape: ModelShape, settings: ActivationSettings) -> float:
    return _beside_a_half(shape, settings) + _attention_bytes(shape, settings) / settings.tensor_parallel_size


def _feed_forward_half(shape: ModelShape, settings: ActivationSettings) -> float:
    inside = _ffn_elements(shape) * settings.element_bytes
    return _beside_a_half(shape, settings) + inside / settings.tensor_parallel_size


HALF_BYTES: dict[str, Callable[[ModelShape, ActivationSettings], float]] = {
    ATTENTION: _attention_half,
    FEED_FORWARD: _feed_forward_half,
}
"""Half of a block -> what it keeps of one token without recomputation."""


def _beside_a_half(shape: ModelShape, settings: ActivationSettings) -> float:
    """Its input, the norm's output and the mask: without sequence parallelism whole on every rank."""
    streams = 3 if settings.plain_rms_norm else 2
    return shape.hidden_size * (streams * settings.element_bytes + settings.mask_bytes) / settings.slices


def _kept_by_block(shape: ModelShape, settings: ActivationSettings) -> float:
    """Of one token, from its forward to its backward pass."""
    stream = shape.hidden_size * settings.element_bytes / settings.slices
    if BLOCK in settings.recomputed:
        return stream
    return sum(stream if half in settings.recomputed else kept(shape, settings) for half, kept in HALF_BYTES.items())


def _again_per_token(shape: ModelShape, settings: ActivationSettings) -> float:
    """What stands of one token while a part of a block is computed again."""
    if BLOCK in settings.recomputed:
        return block_bytes_per_token(shape, settings)
    return max((HALF_BYTES[half](shape, settings) for half in settings.recomputed), default=0.0)


def _ffn_elements(shape: ModelShape) -> int:
    return shape.ffn_hidden_size * (4 if shape.gated_ffn else 2)


def _attention_bytes(shape: ModelShape, settings: ActivationSettings) -> float:
    """Of one token over all heads, from the projection to the input of the output layer."""
    hidden, size = shape.hidden_size, settings.element_bytes
    key_value = hidden // shape.num_attention_heads * shape.num_key_value_heads
    fused = hidden + 2 * key_value
    widened = settings.on_cpu and size < FP32_BYTES and not settings.math_attention
    plain = settings.math_attention or (settings.on_cpu and settings.dropout)
    kept = float(hidden * size)  # the input of the output layer
    if settings.qk_norm:
        kept += (hidden + (fused if widened or plain else 0)) * size
    if plain:  # queries, keys and values are copied, keys and values once for every query head
        return kept + 3 * hidden * (FP32_BYTES if widened else size) + _attention_weights(shape, settings, widened)
    if widened:
        kept += (hidden + fused) * FP32_BYTES
    else:
        kept += (fused + hidden + key_value) * size
    return kept + FP32_BYTES * shape.num_attention_heads  # the log-sums of the fused kernel


def _attention_weights(shape: ModelShape, settings: ActivationSettings, widened: bool) -> float:
    """Of one token: the fp32 softmax, its rounding, what dropout keeps and leaves of it, and the cap, all heads."""
    size = FP32_BYTES if widened else settings.element_bytes
    each = FP32_BYTES + (size if size < FP32_BYTES else 0)
    if settings.dropout:
        each += size + (size if settings.on_cpu else 1)
    if settings.attention_logit_cap:
        each += FP32_BYTES
    return shape.num_attention_heads * shape.seq_length * each


def _kept_per_token(shape: ModelShape, parts: ModelParts, stage: StageLayers, settings: ActivationSettings) -> float:
    """Bytes that a micro-batch in flight has left on a stage, a token."""
    stream = shape.hidden_size * settings.element_bytes / settings.slices
    kept = stage.num_blocks * _kept_by_block(shape, settings)
    if stage.has_embedding_finish:
        kept += stream if parts.embedding_norm else 0.0
        kept += shape.hidden_size * settings.mask_bytes / settings.slices
    # The input of the final norm, and the last layer's output (or the head's input).
    return kept + stream * (2 if stage.has_final_norm else 1)


def _working_in_block(shape: ModelShape, settings: ActivationSettings, tokens: int) -> float:
    """Gradients on both sides of a feed-forward layer, and of its largest weight."""
    stream, inner = 2 * shape.hidden_size / settings.slices, _ffn_elements(shape) / settings.tensor_parallel_size
    largest = largest_matrix(shape, StageLayers.blocks(1), settings.tensor_parallel_size)
    return tokens * settings.element_bytes * (stream + inner) + largest * settings.weight_gradient_bytes
