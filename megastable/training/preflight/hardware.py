"""Rules of the number format on the GPUs of this machine; silent where there are none."""

from __future__ import annotations

from collections.abc import Iterator

from megastable.training.preflight.finding import Finding
from megastable.training.preflight.gpus import Gpu
from megastable.training.preflight.review import Review

TENSOR_CORES_FROM = (7, 0)
BF16_FROM = (8, 0)
NO_TENSOR_CORES = ("GTX 16",)
"""Parts of the names of GPUs that have none in spite of their capability, 7.5."""


def has_tensor_cores(gpu: Gpu) -> bool:
    """Volta and later, but for Turing's smallest chips."""
    return gpu.capability >= TENSOR_CORES_FROM and not any(name in gpu.name for name in NO_TENSOR_CORES)


def fp16_has_tensor_cores(review: Review) -> Iterator[Finding]:
    """Without them fp16 has its dangers and little of its speed."""
    for gpu in review.gpus:
        if review.run.fp16.enabled and not has_tensor_cores(gpu):
            yield Finding(
                "warning",
                "fp16.enabled",
                f"{gpu.name} (compute capability {_version(gpu)}) has no tensor cores: fp16 is hardly faster there, "
                "and overflows like anywhere",
                "fp32 (fp16 off), or a GPU from capability 7.0 on",
            )


def bf16_has_hardware(review: Review) -> Iterator[Finding]:
    """Before Ampere bf16 is emulated."""
    for gpu in review.gpus:
        if review.run.bf16.enabled and gpu.capability < BF16_FROM:
            yield Finding(
                "warning",
                "bf16.enabled",
                f"{gpu.name} (compute capability {_version(gpu)}) has no bf16 arithmetic, which begins at 8.0",
                "fp16, or fp32",
            )


def _version(gpu: Gpu) -> str:
    return ".".join(map(str, gpu.capability))
