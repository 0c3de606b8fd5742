"""The number formats of a run, as DeepSpeed stores its weights and gradients."""

from __future__ import annotations

from megastable.config import RunConfig
from megastable.core.memory import NumberFormat

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
FORMATS: dict[tuple[str, str], NumberFormat] = {
    ("fp32", "fp32"): NumberFormat(weight_bytes=4, gradient_bytes=4),
    ("bf16", "bf16"): NumberFormat(weight_bytes=2, gradient_bytes=2),
    ("fp16", "fp16"): NumberFormat(weight_bytes=2, gradient_bytes=2),
    ("bf16", "fp32"): NumberFormat(weight_bytes=2, gradient_bytes=4, flat_fp32_sums=True),
    # ZeRO keeps a sum beside every gradient.
    ("fp16", "fp32"): NumberFormat(weight_bytes=2, gradient_bytes=6),
}
"""(Format of the weights, of the sums of their gradients) -> bytes of both."""
BF16_GRADIENTS_KEPT = NumberFormat(weight_bytes=2, gradient_bytes=6, flat_fp32_sums=True)
"""bf16 with fp32 sums that are added up after a whole micro-batch: bf16.immediate_grad_update is false."""


def number_format(run: RunConfig) -> NumberFormat:
    """Bytes of the run's weights and gradients."""
    found = FORMATS[run.number_format, sums_format(run)]
    return found if not found.flat_fp32_sums or run.bf16.immediate_grad_update else BF16_GRADIENTS_KEPT


def sums_format(run: RunConfig) -> str:
    """In which gradients of micro-batches are summed."""
    return run.data_types.grad_accum_dtype or run.number_format


def communication_bytes(run: RunConfig) -> int:
    """Of a gradient on its way between replicas; see ``engine.deepspeed_config``."""
    travelling = run.communication_data_type or ("fp32" if sums_format(run) == "fp32" else run.number_format)
    return BYTES[travelling]
