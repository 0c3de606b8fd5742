"""Matrix products of linear layers, in fp32 between casts where a CPU would only emulate 16-bit ones.

A product in 16 bits sums in fp32 and rounds its result, on a GPU and here alike. A CPU without 16-bit arithmetic gets
there up to forty times slower by itself than by widening both sides first (benchmarks/LOG.md).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

_HAS_ONEDNN = torch.backends.mkldnn.is_available()
SUPPORTED_ON_CPU: dict[torch.dtype, bool] = {
    torch.bfloat16: _HAS_ONEDNN and torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    torch.float16: _HAS_ONEDNN and torch.ops.mkldnn._is_mkldnn_fp16_supported(),
}
"""16-bit format -> whether oneDNN, which multiplies torch's matrices on a CPU, takes it on this one. It is a plain
table because torch.compile can read one, and cannot call oneDNN."""


def is_emulated(device_type: str, dtype: torch.dtype) -> bool:
    """Tell whether a product in the format would run far slower than in fp32."""
    return device_type == "cpu" and not SUPPORTED_ON_CPU.get(dtype, True)


def product(a: Tensor, b: Tensor) -> Tensor:
    """Compute ``a @ b``. The casts are for use inside a ``Function``: autograd would keep the wide copies."""
    if is_emulated(a.device.type, a.dtype):
        return (a.float() @ b.float()).to(a.dtype)
    return a @ b


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Map (..., in) to (..., out) by a weight (out, in); for use inside a ``Function``, as ``product``."""
    if is_emulated(x.device.type, x.dtype):
        wide_bias = None if bias is None else bias.float()
        return F.linear(x.float(), weight.float(), wide_bias).to(x.dtype)
    return F.linear(x, weight, bias)


def weight_gradient(gradient: Tensor, x: Tensor) -> Tensor:
    """Compute the gradient of a weight (out, in) from that of its layer's output (..., out) and the input (..., in)."""
    return product(gradient.flatten(0, -2).t(), x.flatten(0, -2))


def differentiable_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Map (..., in) to (..., out). What it keeps for the backward pass stays in the format of the input."""
    if torch.compiler.is_compiling():
        # The compiler derives the backward pass itself, and chooses what is cheapest to keep for it.
        return linear(x, weight)
    result: Tensor = _Linear.apply(x, weight)
    return result


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return product(gradients[0], weight), weight_gradient(gradients[0], x)
