"""Gradient clipping by the global norm (Pascanu et al., arXiv 1211.5063, section 3.2)."""

import math


def clip_coefficient(grad_norm: float, clip_norm: float) -> float:
    """Return what clipping to ``clip_norm`` multiplies a gradient of ``grad_norm`` by; 1 where it does nothing.

    A ``clip_norm`` of 0 means no clipping. The gradient of a skipped step, whose norm is not finite, counts 0.
    """
    if not math.isfinite(grad_norm):
        return 0.0
    if clip_norm <= 0:
        return 1.0
    # The summand, torch's own, keeps the quotient finite where all gradients are zero.
    return min(1.0, clip_norm / (grad_norm + 1e-6))
