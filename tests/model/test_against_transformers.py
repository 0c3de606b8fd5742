"""The same weights give the same logits as the GPT-2, LLaMA and BLOOM of `transformers`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BloomConfig, BloomForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from megastable.config import RunConfig
from megastable.model.attention import ATTENTION_BACKENDS
from tests.support.reference import ReferenceModel
from tests.support.tiny_run import tiny_run

HIDDEN_SIZE, HEADS, NUM_LAYERS, SEQ_LENGTH, VOCAB_SIZE = 48, 6, 3, 16, 300
HEAD_DIM = HIDDEN_SIZE // HEADS
Weights = dict[str, Tensor]

pytestmark = pytest.mark.parametrize("backend", ATTENTION_BACKENDS)


def randomise(model: nn.Module) -> Weights:
    """Every weight, bias and norm to something that cannot be mistaken for another; returns them by name."""
    generator = torch.Generator().manual_seed(31)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator) + (parameter.dim() == 1))
    model.eval()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def our_run(backend: str, **model: Any) -> RunConfig:
    """The run of our model of the same sizes."""
    sizes: dict[str, Any] = {
        "hidden_size": HIDDEN_SIZE, "num_attention_heads": HEADS, "num_layers": NUM_LAYERS, "seq_length": SEQ_LENGTH,
        "vocab_size": VOCAB_SIZE, "attention": backend, **model,
    }  # fmt: skip
    return tiny_run(**{f"megastable__model__{key}": value for key, value in sizes.items()})


def our_model(backend: str, weights: Weights, **model: Any) -> ReferenceModel:
    """Our model with ``weights``, each by its own name; biases that are not given are 0."""
    ours = ReferenceModel(our_run(backend, **model))
    missing, unknown = set(dict(ours.named_parameters())) - set(weights), set(weights) - set(ours.state_dict())
    assert not unknown and all(name.endswith(".bias") for name in missing)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if name in missing:
                parameter.zero_()
            elif weights[name].shape == parameter.shape:
                parameter.copy_(weights[name])
            else:  # a padded vocabulary
                parameter.fill_(5.0)[:VOCAB_SIZE] = weights[name]
    return ours.eval()


def fuse(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Our fused projection from separate ones (heads * head_dim, ...): per key-value head its queries, key, value."""
    rows = []
    queries_per_key = q.shape[0] // k.shape[0]
    for head in range(k.shape[0] // HEAD_DIM):
        rows.append(q[head * queries_per_key * HEAD_DIM : (head + 1) * queries_per_key * HEAD_DIM])
        rows.append(k[head * HEAD_DIM : (head + 1) * HEAD_DIM])
        rows.append(v[head * HEAD_DIM : (head + 1) * HEAD_DIM])
    return torch.cat(rows)


def both(weights: Weights, theirs: str, ours: str) -> Weights:
    """Weight and bias of one part, under our name."""
    return {f"{ours}.{kind}": weights[f"{theirs}.{kind}"] for kind in ("weight", "bias")}


def assert_same_logits(ours: ReferenceModel, theirs: nn.Module) -> None:
    token_ids = torch.randint(VOCAB_SIZE, (2, SEQ_LENGTH), generator=torch.Generator().manual_seed(32))
    with torch.no_grad():
        found, expected = ours(token_ids)[..., :VOCAB_SIZE], theirs(token_ids).logits
    assert expected.std() > 0.5, "logits this flat would hide a fault"
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def gpt2() -> tuple[nn.Module, Weights, dict[str, Any]]:
    """A random GPT-2, its weights under our names, and what our model has to be."""
    theirs = GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCAB_SIZE, n_positions=SEQ_LENGTH, n_embd=HIDDEN_SIZE, n_layer=NUM_LAYERS, n_head=HEADS)
    )
    hf = randomise(theirs)
    weights = {
        "embedding.weight": hf["transformer.wte.weight"],
        "1.positions.weight": hf["transformer.wpe.weight"],
        **both(hf, "transformer.ln_f", f"{NUM_LAYERS + 2}.norm"),
    }
    for index in range(NUM_LAYERS):
        block, name = f"{index + 2}", f"transformer.h.{index}"
        # GPT-2's layers are (in, out), and its fused projection holds all queries, then all keys, then all values.
        fused = [hf[f"{name}.attn.c_attn.weight"].T.chunk(3), hf[f"{name}.attn.c_attn.bias"].chunk(3)]
        weights |= {
            f"{block}.attention.query_key_value.weight": fuse(*fused[0]),
            f"{block}.attention.query_key_value.bias": fuse(*fused[1]),
            **both(hf, f"{name}.ln_1", f"{block}.attention_norm"),
            **both(hf, f"{name}.ln_2", f"{block}.feed_forward_norm"),
        }
        for their_part, our_part in (
            ("attn.c_proj", "attention.output"), ("mlp.c_fc", "feed_forward.input"),
            ("mlp.c_proj", "feed_forward.output"),
        ):  # fmt: skip
            weights[f"{block}.{our_part}.weight"] = hf[f"{name}.{their_part}.weight"].T
            weights[f"{block}.{our_part}.bias"] = hf[f"{name}.{their_part}.bias"]
    return theirs, weights, {"position_embedding": "learned"}


def test_gpt2(backend: str) -> None:
    theirs, weights, model = gpt2()
    assert_same_logits(our_model(backend, weights, **model), theirs)


@pytest.mark.parametrize("kv_heads", [1, 2, HEADS])
def test_llama(backend: str, kv_heads: int) -> None:
    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB_SIZE, hidden_size=HIDDEN_SIZE, num_hidden_layers=NUM_LAYERS, num_attention_heads=HEADS,
            num_key_value_heads=kv_heads, intermediate_size=80, max_position_embeddings=SEQ_LENGTH, rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": 500.0}, tie_word_embeddings=False,
        )
    )  # fmt: skip
    hf = randomise(theirs)
    weights = {
        "0.weight": hf["model.embed_tokens.weight"],
        f"{NUM_LAYERS + 2}.norm.weight": hf["model.norm.weight"],
        f"{NUM_LAYERS + 3}.linear.weight": hf["lm_head.weight"],
    }
    for index in range(NUM_LAYERS):
        block, name = f"{index + 2}", f"model.layers.{index}"
        q, k, v = (hf[f"{name}.self_attn.{part}_proj.weight"] for part in "qkv")
        weights[f"{block}.attention.query_key_value.weight"] = fuse(q, k, v)
        gate_and_up = [hf[f"{name}.mlp.{part}_proj.weight"] for part in ("gate", "up")]
        weights[f"{block}.feed_forward.input.weight"] = torch.cat(gate_and_up)
        for their_part, our_part in (
            ("self_attn.o_proj", "attention.output"), ("mlp.down_proj", "feed_forward.output"),
            ("input_layernorm", "attention_norm"), ("post_attention_layernorm", "feed_forward_norm"),
        ):  # fmt: skip
            weights[f"{block}.{our_part}.weight"] = hf[f"{name}.{their_part}.weight"]
    ours = our_model(
        backend, weights, position_embedding="rotary", rotary_base=500.0, norm="rmsnorm", activation="swiglu",
        ffn_hidden_size=80, num_key_value_heads=kv_heads, tie_embeddings=False,
    )  # fmt: skip
    assert_same_logits(ours, theirs)


def bloom() -> tuple[nn.Module, Weights, dict[str, Any]]:
    """A random BLOOM, its weights under our names, and what our model has to be."""
    theirs = BloomForCausalLM(
        BloomConfig(vocab_size=VOCAB_SIZE, hidden_size=HIDDEN_SIZE, n_layer=NUM_LAYERS, n_head=HEADS)
    )
    hf = randomise(theirs)
    weights = {
        "embedding.weight": hf["transformer.word_embeddings.weight"],
        **both(hf, "transformer.word_embeddings_layernorm", "1.norm"),
        **both(hf, "transformer.ln_f", f"{NUM_LAYERS + 2}.norm"),
    }
    for index in range(NUM_LAYERS):
        for their_part, our_part in (
            # BLOOM's fused projection lies head by head, as ours does.
            ("self_attention.query_key_value", "attention.query_key_value"),
            ("self_attention.dense", "attention.output"), ("mlp.dense_h_to_4h", "feed_forward.input"),
            ("mlp.dense_4h_to_h", "feed_forward.output"), ("input_layernorm", "attention_norm"),
            ("post_attention_layernorm", "feed_forward_norm"),
        ):  # fmt: skip
            weights |= both(hf, f"transformer.h.{index}.{their_part}", f"{index + 2}.{our_part}")
    return theirs, weights, {"position_embedding": "alibi", "embedding_norm": True}


def test_bloom(backend: str) -> None:
    theirs, weights, model = bloom()
    assert_same_logits(our_model(backend, weights, **model), theirs)
