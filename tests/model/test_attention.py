"""Every attention backend against a plain fp64 reference; fp16 where an unscaled product overflows; the layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megastable.model.attention import ATTENTION_BACKENDS, SelfAttention
from megastable.model.positions import POSITION_EMBEDDINGS, AttentionBias, alibi_slopes
from megastable.model.tensor_parallel import OneProcess
from tests.model.plain_attention import plain_attention, plain_rotation
from tests.support.tiny_run import tiny_run

HEADS, HEAD_DIM, SEQ_LENGTH, ROTARY_BASE = 4, 8, 11, 100.0
ALIBI_SLOPES = [1 / 4, 1 / 16, 1 / 64, 1 / 256]  # of the paper, for four heads


@pytest.fixture(params=[*ATTENTION_BACKENDS])
def backend(request: pytest.FixtureRequest) -> str:
    """Every registered backend."""
    name: str = request.param
    return name


def self_attention(backend: str, positions: str = "learned", **model: Any) -> SelfAttention:
    """The module as the model builds it, with every weight and bias drawn."""
    sizes = {"hidden_size": HEADS * HEAD_DIM, "num_attention_heads": HEADS, "rotary_base": ROTARY_BASE, **model}
    changes = {f"megastable__model__{key}": value for key, value in sizes.items()}
    run = tiny_run(**changes, megastable__model__attention=backend, megastable__model__position_embedding=positions)
    config = run.megastable.model
    module = SelfAttention(config, POSITION_EMBEDDINGS[positions](config, OneProcess()), OneProcess())
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0.0, 0.3, generator=generator)
    return module


def leave_projections_out(module: SelfAttention) -> None:
    """Let the module take the fused queries, keys and values, and give what it attended to."""
    for name in ("query_key_value", "output"):
        setattr(module, name, torch.nn.Identity())


def plain_self_attention(module: SelfAttention, x: Tensor, kv_heads: int, positions: str) -> Tensor:
    """What ``module`` should give for ``x``, in fp64 from its weights.

    The rows of the fused projection are read one head at a time, in the order that the layout promises: for each
    key-value head its query heads, its key, its value.
    """
    into = module.query_key_value
    assert into.bias is not None
    fused = torch.nn.functional.linear(x.double(), into.weight.double(), into.bias.double())
    columns = list(fused.split(HEAD_DIM, dim=-1))
    q, k, v = [], [], []
    for _ in range(kv_heads):
        q += [columns.pop(0) for _ in range(HEADS // kv_heads)]
        k.append(columns.pop(0))
        v.append(columns.pop(0))
    assert not columns
    queries, keys, values = (torch.stack(heads, dim=1) for heads in (q, k, v))
    if positions == "rotary":
        queries, keys = plain_rotation(queries, ROTARY_BASE), plain_rotation(keys, ROTARY_BASE)
    attended = plain_attention(queries, keys, values, ALIBI_SLOPES if positions == "alibi" else None)
    joined = torch.cat(attended.unbind(dim=1), dim=-1)
    assert module.output.bias is not None
    return torch.nn.functional.linear(joined, module.output.weight.double(), module.output.bias.double())


def output_and_gradients(forward: Callable[[Tensor], Tensor], module: SelfAttention, x: Tensor) -> list[Tensor]:
    """The output, and the gradients of a weighted sum of it by the input and every parameter."""
    x = x.clone().requires_grad_()
    output = forward(x)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(13), dtype=torch.float64)
    loss = (output.double() * weights).sum()
    return [output.detach(), *torch.autograd.grad(loss, [x, *module.parameters()])]


@pytest.mark.parametrize("positions", POSITION_EMBEDDINGS)
@pytest.mark.parametrize("kv_heads", [1, 2, HEADS])
def test_output_and_gradients_equal_the_plain_ones(backend: str, positions: str, kv_heads: int) -> None:
    module = self_attention(backend, positions, num_key_value_heads=kv_heads)
    x = torch.randn(2, SEQ_LENGTH, HEADS * HEAD_DIM, generator=torch.Generator().manual_seed(12))
    found = output_and_gradients(module, module, x)
    expected = output_and_gradients(lambda x: plain_self_attention(module, x, kv_heads, positions), module, x)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("seq_length", [1, 2, 64])
def test_other_lengths_of_the_same_module(backend: str, seq_length: int) -> None:
    module = self_attention(backend, "alibi")
    for length in (SEQ_LENGTH, seq_length):  # the tables of one length must not answer for another
        x = torch.randn(1, length, HEADS * HEAD_DIM, generator=torch.Generator().manual_seed(length))
        expected = plain_self_attention(module, x, HEADS, "alibi")
        torch.testing.assert_close(module(x).double(), expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("slopes", [None, ALIBI_SLOPES], ids=["causal", "alibi"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 4e-3), (torch.bfloat16, 3e-2)])
def test_sixteen_bits_follow_the_plain_output(
    backend: str, slopes: list[float] | None, dtype: torch.dtype, tolerance: float
) -> None:
    generator = torch.Generator().manual_seed(14)
    q, k, v = (torch.randn(2, HEADS, SEQ_LENGTH, HEAD_DIM, generator=generator).to(dtype) for _ in range(3))
    expected = plain_attention(q, k, v, slopes)
    bias, scale = AttentionBias(None if slopes is None else alibi_slopes(HEADS)), HEAD_DIM**-0.25
    found = ATTENTION_BACKENDS[backend](q * scale, k * scale, v, bias, 0.0)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("positions", ["learned", "alibi"])
@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("smaller", [40.0, 30.0], ids=["all 40", "every other key 30"])
def test_fp16_stays_finite_where_the_unscaled_product_overflows(
    backend: str, positions: str, kv_heads: int, smaller: float
) -> None:
    # Head width 128 and q = k = 40: the dot product is 204,800, and fp16 ends at 65,504.
    head_dim, heads, seq = 128, 2, 8
    generator = torch.Generator().manual_seed(15)
    q = torch.full((1, heads, seq, head_dim), 40.0)
    k = torch.full((1, kv_heads, seq, head_dim), 40.0)
    k[:, :, 1::2] = smaller
    v = torch.randn(1, kv_heads, seq, head_dim, generator=generator).half().float()
    unscaled = q.half() @ k.repeat_interleave(heads // kv_heads, dim=1).half().transpose(-1, -2)
    assert unscaled[0, 0, 0, 0] == float("inf"), "the case is no case: the plain product fits"

    # The whole module, with weights that hand over exactly these vectors: it is the module that scales.
    module = self_attention(
        backend, positions, hidden_size=heads * head_dim, num_attention_heads=heads, num_key_value_heads=kv_heads
    )
    groups = zip(q.chunk(kv_heads, dim=1), k.split(1, dim=1), v.split(1, dim=1), strict=True)
    fused = torch.cat([part.transpose(1, 2).flatten(2) for group in groups for part in group], dim=-1)
    leave_projections_out(module)
    fused16 = fused.half().requires_grad_()
    found = module(fused16)

    slopes = [1 / 16, 1 / 256] if positions == "alibi" else None
    leaf = fused.double().requires_grad_()
    expected = _attend_fused(leaf, kv_heads, heads, head_dim, slopes)
    assert found.dtype == torch.float16 and torch.isfinite(found).all()
    torch.testing.assert_close(found.double(), expected, rtol=2e-3, atol=2e-3)

    found.float().sum().backward()
    expected.sum().backward()
    assert fused16.grad is not None and leaf.grad is not None and torch.isfinite(fused16.grad).all()
    values = slice(-head_dim, None)  # of the last key-value head; by q and k the gradient is a rounding error times 40
    torch.testing.assert_close(fused16.grad[..., values].double(), leaf.grad[..., values], rtol=5e-3, atol=5e-3)


def _attend_fused(fused: Tensor, kv_heads: int, heads: int, head_dim: int, slopes: list[float] | None) -> Tensor:
    per_key = fused.unflatten(-1, (kv_heads, heads // kv_heads + 2, head_dim))
    q = per_key[..., :-2, :].flatten(2, 3).transpose(1, 2)
    k, v = per_key[..., -2, :].transpose(1, 2), per_key[..., -1, :].transpose(1, 2)
    return plain_attention(q, k, v, slopes).transpose(1, 2).flatten(2)


def test_queries_and_keys_share_the_scale_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    handed_over: list[Tensor] = []

    def spy(q: Tensor, k: Tensor, v: Tensor, bias: AttentionBias, dropout: float) -> Tensor:
        handed_over.extend((q, k, v))
        return v

    monkeypatch.setitem(ATTENTION_BACKENDS, "math", spy)
    module = self_attention("math", hidden_size=16, num_attention_heads=1)
    leave_projections_out(module)
    fused = torch.randn(1, 5, 3 * 16, generator=torch.Generator().manual_seed(18))
    module(fused)
    for found, given, factor in zip(handed_over, fused.chunk(3, dim=-1), (0.5, 0.5, 1.0), strict=True):
        assert torch.equal(found[:, 0], given * factor)  # 16^(-1/4) is a half


def test_the_alibi_bias_is_not_scaled(backend: str) -> None:
    module = self_attention(backend, "alibi")
    values = torch.eye(SEQ_LENGTH, HEAD_DIM)
    fused = torch.zeros(1, SEQ_LENGTH, HEADS, 3, HEAD_DIM)  # q = k = 0: what is left of the scores is the bias
    fused[..., 2, :] = values[None, :, None, :]
    leave_projections_out(module)
    attended = module(fused.flatten(2)).view(SEQ_LENGTH, HEADS, HEAD_DIM)
    for head, slope in enumerate(ALIBI_SLOPES):
        for query in range(SEQ_LENGTH):
            weights = [2.718281828459045 ** (-slope * (query - key)) for key in range(query + 1)]
            for key in range(min(query + 1, HEAD_DIM)):
                expected = pytest.approx(weights[key] / sum(weights), rel=1e-5)
                assert attended[query, head, key].item() == expected


@pytest.mark.parametrize("positions", ["learned", "alibi"])
def test_dropout_drops_weights_in_training_only_and_keeps_their_mean(backend: str, positions: str) -> None:
    module = self_attention(backend, positions, dropout=0.25)
    x = torch.randn(1, SEQ_LENGTH, HEADS * HEAD_DIM, generator=torch.Generator().manual_seed(16))
    plain = plain_self_attention(module, x, HEADS, positions)
    torch.manual_seed(17)
    module.eval()
    torch.testing.assert_close(module(x).double(), plain, rtol=1e-4, atol=2e-5)
    module.train()
    with torch.no_grad():
        draws = module(x.expand(4000, -1, -1)).double()
    assert (draws[0] - draws[1]).abs().max() > 0.1
    error = draws.std(dim=0, keepdim=True) / 4000**0.5
    assert ((draws.mean(dim=0, keepdim=True) - plain).abs() < 6 * error + 1e-5).all()
