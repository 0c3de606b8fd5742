#!/usr/bin/env python3
"""Time two attention backends side by side on this CPU: which is faster, and up to which sequence length."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megastable.core.scripts import Parser, run_script
from megastable.model.attention import ATTENTION_BACKENDS, AttentionBackend
from megastable.model.positions import AttentionBias, alibi_slopes

MIN_ROUNDS = 3
MAX_ROUNDS = 400
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BIASES: dict[str, Callable[[int], AttentionBias]] = {
    "causal": lambda num_heads: AttentionBias(),
    "alibi": lambda num_heads: AttentionBias(alibi_slopes(num_heads)),
}


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    bias: str
    dtype: str
    seq_length: int


def main() -> None:
    """Time every case and print its row."""
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    rival, baseline = arguments.backends
    print(
        f"forward + backward, batch {arguments.batch_size}, {arguments.heads} heads of {arguments.head_dim}, "
        f"{arguments.threads} thread(s), torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}\n"
    )
    print(f"| bias | dtype | seq_length | {rival} ms | {baseline} ms | {rival} / {baseline} | rounds |")
    print("|---|---|---|---|---|---|---|")
    cases = [
        Case(bias, dtype, seq_length)
        for bias in arguments.bias
        for dtype in arguments.dtype
        for seq_length in arguments.seq_length
    ]
    for case in cases:
        seconds = time_alternating(case, arguments)
        medians = {name: statistics.median(times) * 1e3 for name, times in seconds.items()}
        # The two runs of one round see the same neighbours on a busy machine, so their ratio is the steadier number.
        ratio = statistics.median(a / b for a, b in zip(seconds[rival], seconds[baseline], strict=True))
        print(
            f"| {case.bias} | {case.dtype} | {case.seq_length} | {medians[rival]:.2f} | {medians[baseline]:.2f} "
            f"| {ratio:.2f} | {len(seconds[rival])} |",
            flush=True,
        )


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = Parser(
        description="Time two attention backends side by side: forward plus backward, in turns within one process, so "
        "that a busy machine slows both alike. A ratio below 1 means that the first is faster.",
        epilog="auto_attention in megastable/model/attention.py follows this table. Trust the ratios, not the "
        "milliseconds. Example, one quick case: python -m "
        "benchmarks.attention_backends --bias causal --dtype fp32 --seq-length 256 512 --seconds 2",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    names = sorted(ATTENTION_BACKENDS)
    parser.add_argument(
        "--backends", nargs=2, choices=names, default=["math", "sdpa"], metavar=("RIVAL", "BASELINE"),
        help=f"the two to compare, of {', '.join(names)}",
    )  # fmt: skip
    parser.add_argument(
        "--bias", nargs="+", choices=list(BIASES), default=list(BIASES), help="causal mask alone, or with ALiBi"
    )
    parser.add_argument("--dtype", nargs="+", choices=list(DTYPES), default=["fp32", "bf16"], help="number formats")
    parser.add_argument(
        "--seq-length", nargs="+", type=int, default=[64, 128, 256, 512, 1024, 2048], metavar="N", help="lengths"
    )
    parser.add_argument("--heads", type=int, default=2, help="query heads, and as many key and value heads")
    parser.add_argument("--head-dim", type=int, default=64, help="width of a head")
    parser.add_argument("--batch-size", type=int, default=1, help="samples of one micro-batch")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    parser.add_argument(
        "--seconds", type=float, default=3.0,
        help=f"time for one row; it takes longer where {MIN_ROUNDS} rounds need more",
    )  # fmt: skip
    return parser.parse_args()


def time_alternating(case: Case, arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Return the seconds of every round, by backend; each round runs both, and the next in the other order."""
    inputs = make_inputs(case, arguments)
    bias = BIASES[case.bias](arguments.heads)
    order: list[str] = list(arguments.backends)
    for name in order:  # the bias is made and the kernels are loaded
        forward_and_backward(ATTENTION_BACKENDS[name], inputs, bias)
    seconds: dict[str, list[float]] = {name: [] for name in order}
    deadline = time.perf_counter() + arguments.seconds
    for rounds in range(MAX_ROUNDS):
        if rounds >= MIN_ROUNDS and time.perf_counter() > deadline:
            break
        for name in order:
            started = time.perf_counter()
            forward_and_backward(ATTENTION_BACKENDS[name], inputs, bias)
            seconds[name].append(time.perf_counter() - started)
        order.reverse()
    return seconds


def make_inputs(case: Case, arguments: argparse.Namespace) -> list[Tensor]:
    """Draw q, k and v as the model hands them over: (batch, heads, seq, head_dim), a transposed view, q and k scaled.

    Unscaled, the softmax would give numbers so small that the processor leaves its fast path.
    """
    shape = (arguments.batch_size, case.seq_length, arguments.heads, arguments.head_dim)
    generator = torch.Generator().manual_seed(1)
    scale = arguments.head_dim**-0.25
    drawn = (torch.randn(shape, generator=generator) * factor for factor in (scale, scale, 1.0))
    # (batch, seq, heads, head_dim) -> (batch, heads, seq, head_dim)
    return [tensor.to(DTYPES[case.dtype]).transpose(1, 2).requires_grad_() for tensor in drawn]


def forward_and_backward(backend: AttentionBackend, inputs: list[Tensor], bias: AttentionBias) -> None:
    """Run one forward and one backward pass through the backend alone."""
    q, k, v = inputs
    output = backend(q, k, v, bias, 0.0)
    torch.autograd.grad(output, inputs, torch.ones_like(output))


if __name__ == "__main__":
    run_script(main)
