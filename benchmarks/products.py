"""The three matrix products of a linear layer in 16 bits: torch's own against fp32 between two casts, side by side.

Run it with `python benchmarks/products.py`. Ratios below 1 mean that the casts win.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from megastable.core.scripts import Parser, run_script
from megastable.model.products import is_emulated

Product = Callable[[Tensor, Tensor, Tensor], Tensor]
PRODUCTS: dict[str, Product] = {
    "forward": lambda x, weight, gradient: F.linear(x, weight),
    "input gradient": lambda x, weight, gradient: gradient @ weight,
    "weight gradient": lambda x, weight, gradient: gradient.t() @ x,
}


def seconds(product: Product, *operands: Tensor) -> float:
    """Time one product."""
    started = time.perf_counter()
    product(*operands)
    return time.perf_counter() - started


def in_fp32(product: Product) -> Product:
    """Make the product that widens its operands to fp32, multiplies, and rounds the result back."""
    return lambda *operands: product(*(operand.float() for operand in operands)).to(operands[0].dtype)


def main() -> None:
    """Time all products in turns and print a table."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=512, help="of a micro-batch (512)")
    parser.add_argument("--hidden", type=int, default=512, help="features in; four times as many come out (512)")
    parser.add_argument("--rounds", type=int, default=7, help="turns after the first, which is dropped (7)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    shapes = ((arguments.tokens, arguments.hidden), (4 * arguments.hidden, arguments.hidden))
    print("| format | product | fp32 between casts / own | megastable takes |")
    print("|---|---|---|---|")
    for dtype in (torch.bfloat16, torch.float16):
        operands = [torch.randn(shape).to(dtype) for shape in (*shapes, (arguments.tokens, 4 * arguments.hidden))]
        taken = "fp32 between casts" if is_emulated("cpu", dtype) else "its own"
        for name, product in PRODUCTS.items():
            ratios = [
                seconds(in_fp32(product), *operands) / seconds(product, *operands) for _ in range(arguments.rounds + 1)
            ]
            shown = f"{statistics.median(ratios[1:]):.3f} ({min(ratios[1:]):.3f} to {max(ratios[1:]):.3f})"
            print(f"| {str(dtype).removeprefix('torch.')} | {name} | {shown} | {taken} |", flush=True)


if __name__ == "__main__":
    run_script(main)
