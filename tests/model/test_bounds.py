"""What keeps logits in bounds when it is asked for: the norm of queries and keys, the caps, the z-loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from megastable.core.labels import IGNORED_LABEL
from megastable.model.attention import SelfAttention, math_attention, soft_cap
from megastable.model.loss import token_losses
from megastable.model.positions import POSITION_EMBEDDINGS
from megastable.model.residual_stream import NORMS
from megastable.model.tensor_parallel import OneProcess
from tests.support.reference import ReferenceModel
from tests.support.tiny_run import tiny_run


def largest_logit(scale_of_input: float, **model: Any) -> float:
    """The largest scaled product of a query and a key for an input of this scale."""
    config = tiny_run(**{f"megastable__model__{key}": value for key, value in model.items()}).megastable.model
    torch.manual_seed(3)
    attention = SelfAttention(config, POSITION_EMBEDDINGS["learned"](config, OneProcess()), OneProcess())
    torch.nn.init.normal_(attention.query_key_value.weight)
    seen: list[float] = []

    def look(module: Any, inputs: Any, outputs: Any) -> None:
        q, k = outputs
        seen.append(float((q @ k.transpose(-1, -2)).detach().abs().max()))

    attention.scale.register_forward_hook(look)
    attention(scale_of_input * torch.randn(2, config.seq_length, config.hidden_size))
    return seen[0]


@pytest.mark.parametrize("norm", NORMS)
def test_normed_queries_and_keys_bound_the_logits_whatever_the_input(norm: str) -> None:
    head_dim = 8
    bound = head_dim**0.5 * 1.001  # |q| and |k| are sqrt(head_dim) each, over sqrt(head_dim)
    assert largest_logit(1000.0, qk_norm=True, norm=norm) <= bound < largest_logit(1000.0, norm=norm)


def test_a_soft_cap_keeps_small_values_and_bounds_large_ones() -> None:
    x = torch.tensor([-1e6, -1.0, 0.0, 0.5, 1e6])
    torch.testing.assert_close(soft_cap(x, 50.0), torch.tensor([-50.0, -1.0, 0.0, 0.5, 50.0]), rtol=1e-3, atol=0)
    assert soft_cap(x, None) is x


@pytest.mark.parametrize("backend", ["auto", "math"])
def test_capped_attention_caps_before_the_bias(backend: str) -> None:
    changes = {"megastable__model__attention_logit_cap": 2.0, "megastable__model__attention": backend}
    config = tiny_run(**changes).megastable.model
    positions = POSITION_EMBEDDINGS["alibi"](config, OneProcess())
    attention = SelfAttention(config, positions, OneProcess())
    bias = positions.bias
    q, k, v = (3 * torch.randn(1, 4, 16, 8, generator=torch.Generator().manual_seed(s)) for s in range(3))
    scores = 2.0 * torch.tanh(q @ k.transpose(-1, -2) / 2.0) + bias.get(16, q.device, torch.float32)
    torch.testing.assert_close(attention.backend(q, k, v, bias, 0.0), scores.softmax(-1) @ v)
    assert not torch.allclose(math_attention(q, k, v, bias, 0.0), scores.softmax(-1) @ v, rtol=1e-2)


@pytest.mark.parametrize("tied", [True, False])
def test_output_logits_stay_below_their_cap(tied: bool) -> None:
    run = tiny_run(megastable__model__output_logit_cap=0.1, megastable__model__tie_embeddings=tied)
    free = tiny_run(megastable__model__tie_embeddings=tied)
    ids = torch.arange(16).unsqueeze(0)
    assert ReferenceModel(run)(ids).abs().max() <= 0.1 < ReferenceModel(free)(ids).abs().max()


def test_the_z_loss_adds_its_gradient_and_leaves_the_value_alone() -> None:
    generator = torch.Generator().manual_seed(9)
    logits = 5 * torch.randn(2, 7, 32, generator=generator)
    labels = torch.randint(20, (2, 7), generator=generator)
    labels[0, :3] = IGNORED_LABEL
    results = []
    for ours in (True, False):
        leaf = logits.clone().requires_grad_()
        if ours:
            plain = token_losses(leaf, labels, 20, OneProcess(), z_loss=0.1).sum()
            total = plain
        else:
            seen = leaf[..., :20]
            normaliser = seen.logsumexp(-1)[labels != IGNORED_LABEL]
            plain = F.cross_entropy(seen.flatten(0, 1), labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum")
            total = plain + 0.1 * (normaliser**2).sum()
        total.backward()
        results.append((plain.detach(), leaf.grad))
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-6)
