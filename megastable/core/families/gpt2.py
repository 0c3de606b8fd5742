"""GPT-2: learned positions, layer norms, one GELU layer; weights lie as (in, out), and all queries before all keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megastable.core.families.family import ONE_KEY_A_QUERY, PLAIN, Family, MappedTensor, Part, Switch
from megastable.core.families.model_settings import ModelSettings
from megastable.core.families.tables import FusedRows, layer_norm, linear, same
from megastable.core.families.their_config import ACTIVATIONS, ReadModel, TheirConfig, their_activation


def _tensors(model: ModelSettings) -> Iterator[MappedTensor]:
    hidden = model.hidden_size
    yield same("embedding.weight", (model.vocab_size, hidden), "transformer.wte.weight")
    yield same("embedding_finish.positions.weight", (model.seq_length, hidden), "transformer.wpe.weight")
    rows = FusedRows.of(model)
    queries_keys_values = rows.queries + rows.keys + rows.values
    for number in range(model.num_layers):
        ours, theirs = f"block_{number}", f"transformer.h.{number}"
        yield from layer_norm(f"{ours}.attention_norm", f"{theirs}.ln_1", hidden)
        fused = f"{ours}.attention.query_key_value"
        weight = Part(f"{theirs}.attn.c_attn.weight", queries_keys_values, transposed=True)
        yield MappedTensor(f"{fused}.weight", (rows.total, hidden), (weight,))
        bias = Part(f"{theirs}.attn.c_attn.bias", queries_keys_values)
        yield MappedTensor(f"{fused}.bias", (rows.total,), (bias,))
        yield from linear(f"{ours}.attention.output", f"{theirs}.attn.c_proj", hidden, hidden, transposed=True)
        yield from layer_norm(f"{ours}.feed_forward_norm", f"{theirs}.ln_2", hidden)
        inner = model.ffn_size
        yield from linear(f"{ours}.feed_forward.input", f"{theirs}.mlp.c_fc", inner, hidden, transposed=True)
        yield from linear(f"{ours}.feed_forward.output", f"{theirs}.mlp.c_proj", hidden, inner, transposed=True)
    yield from layer_norm("final_norm.norm", "transformer.ln_f", hidden)
    if not model.tie_embeddings:
        yield same("head.linear.weight", (model.vocab_size, hidden), "lm_head.weight")


def _write_config(model: ModelSettings) -> dict[str, Any]:
    return {
        "n_positions": model.seq_length,
        "n_embd": model.hidden_size,
        "n_layer": model.num_layers,
        "n_head": model.num_attention_heads,
        "n_inner": model.ffn_size,
        "activation_function": their_activation(model.activation),
        "layer_norm_epsilon": model.norm_eps,
        "embd_pdrop": model.dropout,
        "attn_pdrop": model.dropout,
        "resid_pdrop": model.dropout,
    }


def _read_config(config: TheirConfig) -> ReadModel:
    config.must_be("scale_attn_weights", True)
    config.must_be("scale_attn_by_inverse_layer_idx", False)
    config.must_be("add_cross_attention", False)
    hidden = config.size("n_embd", "hidden_size", default=768)
    dropout, remarks = config.one_dropout("embd_pdrop", "attn_pdrop", "resid_pdrop", default=0.1)
    section = {
        "num_layers": config.size("n_layer", "num_hidden_layers", default=12),
        "hidden_size": hidden,
        "num_attention_heads": config.size("n_head", "num_attention_heads", default=12),
        "ffn_hidden_size": config.size("n_inner", default=4 * hidden),
        "seq_length": config.size("n_positions", "max_position_embeddings", "n_ctx", default=1024),
        "vocab_size": config.size("vocab_size", default=50257),
        "activation": config.chosen("activation_function", ACTIVATIONS, default="gelu_new"),
        "norm_eps": config.number("layer_norm_epsilon", default=1e-5),
        "tie_embeddings": config.flag("tie_word_embeddings", default=True),
        "dropout": dropout,
    }
    return ReadModel(section, remarks)


GPT2 = Family(
    name="gpt2",
    model_type="gpt2",
    class_name="GPT2LMHeadModel",
    base_prefix="transformer.",
    switches={
        **PLAIN,
        "position_embedding": Switch("learned"),
        "norm": Switch("layernorm"),
        "activation": Switch("gelu", ("gelu_exact",)),
        "linear_biases": Switch(True),
        "parallel_residual": Switch(False),
        "embedding_norm": Switch(False),
        "tie_embeddings": Switch(True, (False,)),
    },
    conditions=(ONE_KEY_A_QUERY,),
    tensors=_tensors,
    write_config=_write_config,
    read_config=_read_config,
    ignored=(".attn.bias", ".attn.masked_bias"),
)
