"""A compiled block computes what the plain one does, as one graph that all blocks share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megastable.core.layers import LayerKind
from megastable.model import products
from megastable.model.block import TransformerBlock
from megastable.model.layers import gpt_layers
from megastable.model.tensor_parallel import OneProcess
from tests.support.tiny_run import tiny_run

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
BLOCKS: dict[str, dict[str, Any]] = {
    "rotary": {},
    "ALiBi": {"megastable__model__position_embedding": "alibi"},
    "no biases, gated, grouped": {
        "megastable__model__norm": "rmsnorm",
        "megastable__model__activation": "swiglu",
        "megastable__model__num_key_value_heads": 2,
        "megastable__model__qk_norm": True,
    },
    "GPT-NeoX": {
        "megastable__model__rotary_fraction": 0.25,
        "megastable__model__parallel_residual": True,
        "megastable__model__linear_biases": False,
        "megastable__model__activation": "gelu_exact",
    },
    "capped": {"megastable__model__attention_logit_cap": 5.0},
    "halves": {"megastable__pipeline__activation_checkpointing": ["attention", "feed_forward"]},
}


def blocks_of(dtype: torch.dtype, **changes: Any) -> list[nn.Module]:
    """Two blocks whose tables have been made."""
    layers = gpt_layers(tiny_run(**changes), OneProcess())
    first_two = [layer for layer in layers if layer.kind is LayerKind.BLOCK][:2]
    blocks = [layer.build(tiny_run(**changes)).to(dtype) for layer in first_two]
    assert all(isinstance(block, TransformerBlock) for block in blocks)
    output_and_gradients(blocks, dtype)
    return blocks


def output_and_gradients(blocks: list[nn.Module], dtype: torch.dtype) -> list[Tensor]:
    """Of the input and every parameter, on the same numbers each time."""
    x = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    parameters = [parameter for block in blocks for parameter in block.parameters()]
    torch.manual_seed(5)
    output = blocks[1](blocks[0](x))
    return [output.detach(), *torch.autograd.grad(output.float().square().mean(), [x, *parameters])]


def assert_close(compiled: list[Tensor], plain: list[Tensor], dtype: torch.dtype) -> None:
    """Each tensor, relative to its norm."""
    for one, other in zip(compiled, plain, strict=True):
        assert (one - other).float().norm() <= TOLERANCE[dtype] * other.float().norm()


CASES = [
    *((name, torch.float32, False) for name in BLOCKS),
    ("rotary", torch.bfloat16, True),
    ("ALiBi", torch.bfloat16, False),
]


@pytest.mark.parametrize(("name", "dtype", "emulated"), CASES)
def test_blocks_are_captured_whole_once_and_equal(
    name: str, dtype: torch.dtype, emulated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(products.SUPPORTED_ON_CPU, torch.bfloat16, not emulated)
    torch._dynamo.reset()
    blocks = blocks_of(dtype, **BLOCKS[name])
    plain = output_and_gradients(blocks, dtype)
    for block in blocks:
        block.compile(backend="aot_eager", dynamic=False, fullgraph=True)
    assert_close(output_and_gradients(blocks, dtype), plain, dtype)
    with torch.compiler.set_stance("fail_on_recompile"):
        assert_close(output_and_gradients(blocks, dtype), plain, dtype)


def test_dropout_repeats_itself_where_halves_are_computed_again() -> None:
    torch._dynamo.reset()
    results = []
    for kinds in (False, ["attention", "feed_forward"]):
        changes = {"megastable__model__dropout": 0.3, "megastable__pipeline__activation_checkpointing": kinds}
        blocks = blocks_of(torch.float32, **changes)
        for block in blocks:
            block.compile(backend="aot_eager", dynamic=False, fullgraph=True)
        results.append(output_and_gradients(blocks, torch.float32))
    assert_close(results[1], results[0], torch.float32)
