"""Llama: rotary positions, RMS norms, SwiGLU, grouped keys and values, as a rule no biases."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megastable.core.families.family import PLAIN, Family, MappedTensor, Part, Switch
from megastable.core.families.model_settings import ModelSettings
from megastable.core.families.tables import FusedRows, layer_norm, linear, same
from megastable.core.families.their_config import NotExpressibleError, ReadModel, TheirConfig

ACTIVATIONS = {"silu": "swiglu", "swish": "swiglu"}


def _tensors(model: ModelSettings) -> Iterator[MappedTensor]:
    hidden = model.hidden_size
    inner = model.ffn_size
    rows = FusedRows.of(model)
    yield same("embedding.weight", (model.vocab_size, hidden), "model.embed_tokens.weight")
    for number in range(model.num_layers):
        ours, theirs = f"block_{number}", f"model.layers.{number}"
        yield from layer_norm(f"{ours}.attention_norm", f"{theirs}.input_layernorm", hidden, has_bias=False)
        for kind in _kinds(model):
            shape = (rows.total, hidden) if kind == "weight" else (rows.total,)
            attention = f"{theirs}.self_attn"
            # Channels of a head are turned in the same pairs, i and i + head_dim / 2.
            parts = (
                Part(f"{attention}.q_proj.{kind}", rows.queries),
                Part(f"{attention}.k_proj.{kind}", rows.keys),
                Part(f"{attention}.v_proj.{kind}", rows.values),
            )
            yield MappedTensor(f"{ours}.attention.query_key_value.{kind}", shape, parts)
        output = f"{theirs}.self_attn.o_proj"
        yield from linear(f"{ours}.attention.output", output, hidden, hidden, model.linear_biases)
        yield from layer_norm(f"{ours}.feed_forward_norm", f"{theirs}.post_attention_layernorm", hidden, has_bias=False)
        for kind in _kinds(model):
            shape = (2 * inner, hidden) if kind == "weight" else (2 * inner,)
            gate = Part(f"{theirs}.mlp.gate_proj.{kind}", ((0, inner),))
            path = Part(f"{theirs}.mlp.up_proj.{kind}", ((inner, 2 * inner),))
            yield MappedTensor(f"{ours}.feed_forward.input.{kind}", shape, (gate, path))
        narrowing = f"{theirs}.mlp.down_proj"
        yield from linear(f"{ours}.feed_forward.output", narrowing, hidden, inner, model.linear_biases)
    yield from layer_norm("final_norm.norm", "model.norm", hidden, has_bias=False)
    if not model.tie_embeddings:
        yield same("head.linear.weight", (model.vocab_size, hidden), "lm_head.weight")


def _kinds(model: ModelSettings) -> tuple[str, ...]:
    return ("weight", "bias") if model.linear_biases else ("weight",)


def _write_config(model: ModelSettings) -> dict[str, Any]:
    return {
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": model.seq_length,
        "rms_norm_eps": model.norm_eps,
        # transformers before version 5 read the second of the two.
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rotary_base},
        "rope_theta": model.rotary_base,
        "attention_bias": model.linear_biases,
        "mlp_bias": model.linear_biases,
        "attention_dropout": model.dropout,
    }


def _read_config(config: TheirConfig) -> ReadModel:
    hidden = config.size("hidden_size", default=4096)
    heads = config.size("num_attention_heads", default=32)
    head_dim = config.size("head_dim", default=max(1, hidden // heads))
    if head_dim * heads != hidden:
        raise NotExpressibleError(
            f"config.json: head_dim is {head_dim}: must be hidden_size / num_attention_heads ({hidden} / {heads}); "
            "nothing else is built here"
        )
    biases = config.flag("attention_bias", default=False)
    if config.flag("mlp_bias", default=False) != biases:
        raise NotExpressibleError(
            f"config.json: attention_bias is {biases} and mlp_bias is not: all linear layers have biases here, or none"
        )
    base, fraction = config.rotary(fraction=1.0)
    section = {
        "num_layers": config.size("num_hidden_layers", default=32),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": config.size("num_key_value_heads", default=heads),
        "ffn_hidden_size": config.size("intermediate_size", default=11008),
        "seq_length": config.size("max_position_embeddings", default=2048),
        "vocab_size": config.size("vocab_size", default=32000),
        "activation": config.chosen("hidden_act", ACTIVATIONS, default="silu"),
        "rotary_base": base,
        "rotary_fraction": fraction,
        "norm_eps": config.number("rms_norm_eps", default=1e-6),
        "linear_biases": biases,
        "tie_embeddings": config.flag("tie_word_embeddings", default=False),
        "dropout": config.number("attention_dropout", default=0.0),
    }
    return ReadModel(section)


LLAMA = Family(
    name="llama",
    model_type="llama",
    class_name="LlamaForCausalLM",
    base_prefix="model.",
    switches={
        **PLAIN,
        "position_embedding": Switch("rotary"),
        "rotary_fraction": Switch(1.0),
        "norm": Switch("rmsnorm"),
        "activation": Switch("swiglu"),
        "linear_biases": Switch(False, (True,)),
        "parallel_residual": Switch(False),
        "embedding_norm": Switch(False),
        "tie_embeddings": Switch(False, (True,)),
    },
    tensors=_tensors,
    write_config=_write_config,
    read_config=_read_config,
    ignored=(".rotary_emb.inv_freq",),
)
