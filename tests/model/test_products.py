"""Products on a CPU that only emulates 16 bits: the numbers of a device that has them, and nothing wide kept."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megastable.model import products

SIXTEEN_BITS = (torch.bfloat16, torch.float16)


@pytest.fixture(params=[True, False], ids=["emulated", "native"])
def emulated(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Both ways, whatever this CPU can do."""
    monkeypatch.setattr(products, "is_emulated", lambda device, dtype: request.param and dtype in SIXTEEN_BITS)
    return bool(request.param)


def operands(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x (batch, seq, in), weight (out, in), bias and the gradient of the output."""
    torch.manual_seed(0)
    shapes = ((2, 5, 48), (32, 48), (32,), (2, 5, 32))
    x, weight, bias, gradient = (torch.randn(shape).to(dtype) for shape in shapes)
    return x, weight, bias, gradient


@pytest.mark.parametrize("dtype", (*SIXTEEN_BITS, torch.float32))
def test_a_product_is_the_exact_one_rounded_once(emulated: bool, dtype: torch.dtype) -> None:
    x, weight, bias, gradient = operands(dtype)
    exact_x, exact_weight, exact_bias, exact_gradient = (t.double() for t in (x, weight, bias, gradient))
    relative, absolute = 2 * torch.finfo(dtype).eps, 1e-2 if dtype in SIXTEEN_BITS else 1e-4
    pairs = [
        (products.linear(x, weight, bias), torch.nn.functional.linear(exact_x, exact_weight, exact_bias)),
        (products.product(gradient, weight), exact_gradient @ exact_weight),
        (products.weight_gradient(gradient, x), exact_gradient.flatten(0, 1).t() @ exact_x.flatten(0, 1)),
    ]
    for result, exact in pairs:
        assert result.dtype == dtype
        torch.testing.assert_close(result.double(), exact, rtol=relative, atol=absolute)


@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
def test_only_what_is_16_bits_wide_is_kept_for_the_backward_pass(emulated: bool, dtype: torch.dtype) -> None:
    x, weight, _, gradient = operands(dtype)
    x.requires_grad_()
    weight.requires_grad_()
    kept: list[torch.dtype] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.dtype)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = products.differentiable_linear(x, weight)
    y.backward(gradient)
    assert set(kept) == {dtype}
    assert x.grad is not None and weight.grad is not None
    assert torch.equal(x.grad, products.product(gradient, weight.detach()))
    assert torch.equal(weight.grad, products.weight_gradient(gradient, x.detach()))


def test_emulation_is_told_by_device_and_format() -> None:
    assert not products.is_emulated("cpu", torch.float32)
    for dtype, supported in products.SUPPORTED_ON_CPU.items():
        assert products.is_emulated("cpu", dtype) == (not supported)
        assert not products.is_emulated("cuda", dtype)
