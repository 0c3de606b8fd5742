"""GPT-NeoX: rotary positions on a part of each head, layer norms, both halves of a block beside each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megastable.core.families.family import ONE_KEY_A_QUERY, PLAIN, Family, MappedTensor, Switch
from megastable.core.families.model_settings import ModelSettings
from megastable.core.families.tables import FusedRows, layer_norm, linear, same
from megastable.core.families.their_config import ACTIVATIONS, ReadModel, TheirConfig, their_activation

HEAD = "embed_out.weight"
"""In files, also of transformers 5, whose class calls it lm_head."""


def _tensors(model: ModelSettings) -> Iterator[MappedTensor]:
    hidden = model.hidden_size
    yield same("embedding.weight", (model.vocab_size, hidden), "gpt_neox.embed_in.weight")
    for number in range(model.num_layers):
        ours, theirs = f"block_{number}", f"gpt_neox.layers.{number}"
        yield from layer_norm(f"{ours}.attention_norm", f"{theirs}.input_layernorm", hidden)
        # Their fused projection lies head by head, and channels are turned in the same pairs.
        fused = FusedRows.of(model).total
        attention = f"{theirs}.attention"
        yield from linear(f"{ours}.attention.query_key_value", f"{attention}.query_key_value", fused, hidden)
        yield from linear(f"{ours}.attention.output", f"{attention}.dense", hidden, hidden)
        yield from layer_norm(f"{ours}.feed_forward_norm", f"{theirs}.post_attention_layernorm", hidden)
        yield from linear(f"{ours}.feed_forward.input", f"{theirs}.mlp.dense_h_to_4h", model.ffn_size, hidden)
        yield from linear(f"{ours}.feed_forward.output", f"{theirs}.mlp.dense_4h_to_h", hidden, model.ffn_size)
    yield from layer_norm("final_norm.norm", "gpt_neox.final_layer_norm", hidden)
    if not model.tie_embeddings:
        yield same("head.linear.weight", (model.vocab_size, hidden), HEAD)


def _write_config(model: ModelSettings) -> dict[str, Any]:
    return {
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "hidden_act": their_activation(model.activation),
        "max_position_embeddings": model.seq_length,
        "layer_norm_eps": model.norm_eps,
        "use_parallel_residual": model.parallel_residual,
        # transformers before version 5 read the two keys behind the object.
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": model.rotary_base,
            "partial_rotary_factor": model.rotary_fraction,
        },
        "rotary_emb_base": model.rotary_base,
        "rotary_pct": model.rotary_fraction,
        "attention_bias": True,
        "hidden_dropout": model.dropout,
        "attention_dropout": model.dropout,
    }


def _read_config(config: TheirConfig) -> ReadModel:
    config.must_be("attention_bias", True)
    base, fraction = config.rotary(fraction=0.25)
    dropout, remarks = config.one_dropout("hidden_dropout", "attention_dropout", default=0.0)
    section = {
        "num_layers": config.size("num_hidden_layers", default=44),
        "hidden_size": config.size("hidden_size", default=6144),
        "num_attention_heads": config.size("num_attention_heads", default=64),
        "ffn_hidden_size": config.size("intermediate_size", default=24576),
        "seq_length": config.size("max_position_embeddings", default=2048),
        "vocab_size": config.size("vocab_size", default=50432),
        "activation": config.chosen("hidden_act", ACTIVATIONS, default="gelu"),
        "rotary_base": base,
        "rotary_fraction": fraction,
        "norm_eps": config.number("layer_norm_eps", default=1e-5),
        "parallel_residual": config.flag("use_parallel_residual", default=True),
        "tie_embeddings": config.flag("tie_word_embeddings", default=False),
        "dropout": dropout,
    }
    return ReadModel(section, remarks)


GPT_NEOX = Family(
    name="gpt_neox",
    model_type="gpt_neox",
    class_name="GPTNeoXForCausalLM",
    base_prefix="gpt_neox.",
    head_name=HEAD,
    switches={
        **PLAIN,
        "position_embedding": Switch("rotary"),
        "rotary_fraction": Switch(0.25, others=None),
        "norm": Switch("layernorm"),
        "activation": Switch("gelu_exact", ("gelu",)),
        "linear_biases": Switch(True),
        "parallel_residual": Switch(True, (False,)),
        "embedding_norm": Switch(False),
        "tie_embeddings": Switch(False, (True,)),
    },
    conditions=(ONE_KEY_A_QUERY,),
    tensors=_tensors,
    write_config=_write_config,
    read_config=_read_config,
    ignored=(".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq"),
)
