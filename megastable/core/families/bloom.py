"""BLOOM: ALiBi, layer norms, one after the embedding too, and a GELU layer of four times the width."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megastable.core.families.family import ONE_KEY_A_QUERY, PLAIN, Condition, Family, MappedTensor, Switch
from megastable.core.families.model_settings import ModelSettings
from megastable.core.families.tables import FusedRows, layer_norm, linear, same
from megastable.core.families.their_config import ReadModel, TheirConfig

TRAINED_LENGTH = 2048
"""Tokens of a sample of BLOOM's own training: its published config.json names no length."""


def _tensors(model: ModelSettings) -> Iterator[MappedTensor]:
    hidden = model.hidden_size
    yield same("embedding.weight", (model.vocab_size, hidden), "transformer.word_embeddings.weight")
    yield from layer_norm("embedding_finish.norm", "transformer.word_embeddings_layernorm", hidden)
    for number in range(model.num_layers):
        ours, theirs = f"block_{number}", f"transformer.h.{number}"
        yield from layer_norm(f"{ours}.attention_norm", f"{theirs}.input_layernorm", hidden)
        # Their fused projection lies head by head, as ours does.
        fused = FusedRows.of(model).total
        attention = f"{theirs}.self_attention"
        yield from linear(f"{ours}.attention.query_key_value", f"{attention}.query_key_value", fused, hidden)
        yield from linear(f"{ours}.attention.output", f"{attention}.dense", hidden, hidden)
        yield from layer_norm(f"{ours}.feed_forward_norm", f"{theirs}.post_attention_layernorm", hidden)
        yield from linear(f"{ours}.feed_forward.input", f"{theirs}.mlp.dense_h_to_4h", model.ffn_size, hidden)
        yield from linear(f"{ours}.feed_forward.output", f"{theirs}.mlp.dense_4h_to_h", hidden, model.ffn_size)
    yield from layer_norm("final_norm.norm", "transformer.ln_f", hidden)
    if not model.tie_embeddings:
        yield same("head.linear.weight", (model.vocab_size, hidden), "lm_head.weight")


def _write_config(model: ModelSettings) -> dict[str, Any]:
    return {
        "hidden_size": model.hidden_size,
        "n_layer": model.num_layers,
        "n_head": model.num_attention_heads,
        "layer_norm_epsilon": model.norm_eps,
        "hidden_dropout": model.dropout,
        "attention_dropout": model.dropout,
        # The class does not read it; whoever trains on does.
        "seq_length": model.seq_length,
    }


def _read_config(config: TheirConfig) -> ReadModel:
    config.must_be("apply_residual_connection_post_layernorm", False)
    hidden = config.size("n_embed", "hidden_size", default=64)
    dropout, remarks = config.one_dropout("hidden_dropout", "attention_dropout", default=0.0)
    if config.values.get("seq_length") is None:
        remarks += (f"config.json names no length of a sample; seq_length is {TRAINED_LENGTH}",)
    section = {
        "num_layers": config.size("n_layer", "num_hidden_layers", default=2),
        "hidden_size": hidden,
        "num_attention_heads": config.size("n_head", "num_attention_heads", default=8),
        "ffn_hidden_size": 4 * hidden,
        "seq_length": config.size("seq_length", default=TRAINED_LENGTH),
        "vocab_size": config.size("vocab_size", default=250880),
        "norm_eps": config.number("layer_norm_epsilon", default=1e-5),
        "tie_embeddings": config.flag("tie_word_embeddings", default=True),
        "dropout": dropout,
    }
    return ReadModel(section, remarks)


BLOOM = Family(
    name="bloom",
    model_type="bloom",
    class_name="BloomForCausalLM",
    base_prefix="transformer.",
    switches={
        **PLAIN,
        "position_embedding": Switch("alibi"),
        "norm": Switch("layernorm"),
        "activation": Switch("gelu"),
        "linear_biases": Switch(True),
        "parallel_residual": Switch(False),
        "embedding_norm": Switch(True),
        "tie_embeddings": Switch(True, (False,)),
    },
    conditions=(
        ONE_KEY_A_QUERY,
        Condition(
            "ffn_hidden_size",
            lambda model: model.ffn_size == 4 * model.hidden_size,
            "be 4 x hidden_size: the class has no other width",
        ),
    ),
    tensors=_tensors,
    write_config=_write_config,
    read_config=_read_config,
)
