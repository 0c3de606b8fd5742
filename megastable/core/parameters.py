"""The number of weights of a model, by its sizes alone."""

from __future__ import annotations

from megastable.core.flops import ModelShape


def num_parameters(
    shape: ModelShape, *, tie_embeddings: bool, learned_positions: bool, embedding_norm: bool, norm_has_bias: bool
) -> int:
    """All weights of the model: padded embedding, blocks with biases and norms, final norm, head.

    The two small vectors of a norm over queries and keys are left out.
    """
    hidden = shape.hidden_size
    key_value_size = 2 * (hidden // shape.num_attention_heads * shape.num_key_value_heads)
    attention = hidden * (2 * hidden + key_value_size) + (2 * hidden + key_value_size)
    ffn_inputs = shape.ffn_hidden_size * (2 if shape.gated_ffn else 1)
    feed_forward = hidden * (ffn_inputs + shape.ffn_hidden_size) + ffn_inputs + hidden
    norm = hidden * (2 if norm_has_bias else 1)
    block = attention + feed_forward + 2 * norm
    embeddings = shape.padded_vocab_size * hidden * (1 if tie_embeddings else 2)
    positions = shape.seq_length * hidden if learned_positions else 0
    return embeddings + positions + shape.num_layers * block + norm * (2 if embedding_norm else 1)
