"""Bytes on one device of a run under DeepSpeed's ZeRO-1, by kind.

Counted from ``engine.weight_update`` and from DeepSpeed 0.19.8's optimizers: ``DeepSpeedZeroOptimizer`` (fp32, fp16,
bf16) and ``BF16_Optimizer`` (bf16, fp32 sums). Both keep an fp32 copy of their share of the weights, in an fp32 run as
well.
"""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30
FP32_BYTES = 4
MOMENTS = 2
"""Adam's running means: of the gradient and of its square."""
LARGEST_ALL_REDUCE = 500_000_000
"""Elements that DeepSpeed's pipeline engine flattens into one gradient message."""
COPIES_CHECK_BYTES = 8 * 2**20
"""What ``engine.consistency`` keeps to compare copies with, whatever the model."""


@dataclass(frozen=True)
class NumberFormat:
    """Bytes a weight of a run's formats.

    Attributes:
        weight_bytes: of the weights and the activations.
        gradient_bytes: of all that is kept of a gradient from the first micro-batch to the update.
        flat_fp32_sums: the sums are one flat fp32 tensor, which the optimizer reads in place (``BF16_Optimizer``).
    """

    weight_bytes: int
    gradient_bytes: int
    flat_fp32_sums: bool = False


@dataclass(frozen=True)
class MemoryUse:
    """Bytes on one device, by kind."""

    weights: float
    gradients: float
    master_weights: float
    moments: float
    activations: float
    """In flight and at work at the widest point of a backward pass."""
    buffers: float
    """Beside the activations: ZeRO's gradient buffer, which every step allocates in its first backward pass, and what
    the check of copies keeps."""
    update: float
    """While the gradients are reduced and the weights updated, when no activation is left; in place of both."""

    @property
    def total(self) -> float:
        """The peak: the state, and the larger of what the backward passes and what the update need beside it."""
        state = self.weights + self.gradients + self.master_weights + self.moments
        return state + max(self.activations + self.buffers, self.update)

    def by_kind(self) -> dict[str, int]:
        """Whole bytes of every kind, and the peak."""
        kinds = ("weights", "gradients", "master_weights", "moments", "activations", "buffers", "update", "total")
        return {kind: round(getattr(self, kind)) for kind in kinds}


def memory_use(
    number_format: NumberFormat,
    num_parameters: int,
    data_parallel_size: int,
    reduce_bucket_size: int,
    communication_bytes: int,
    activations: float,
) -> MemoryUse:
    """What a device needs for ``num_parameters`` weights.

    Args:
        reduce_bucket_size: elements of ZeRO's gradient buffer.
        communication_bytes: of the format in which gradients travel.
        activations: see ``activation_bytes``.
    """
    share = num_parameters / data_parallel_size
    alone = data_parallel_size == 1  # then nothing is reduced, see ``engine.weight_update``
    bucket = 0 if number_format.flat_fp32_sums or alone else reduce_bucket_size * communication_bytes
    if not number_format.flat_fp32_sums:
        update = _separate_update(number_format, num_parameters, share, bucket)
    else:
        update = 0.0 if alone else _flat_update(num_parameters, communication_bytes)
    return MemoryUse(
        weights=num_parameters * number_format.weight_bytes,
        gradients=num_parameters * number_format.gradient_bytes,
        master_weights=share * FP32_BYTES,
        moments=share * FP32_BYTES * MOMENTS,
        activations=activations,
        buffers=bucket + COPIES_CHECK_BYTES,
        update=COPIES_CHECK_BYTES + update,
    )


def _flat_update(num_parameters: int, communication_bytes: int) -> float:
    """``BF16_Optimizer``: matrices and vectors are two flat tensors, copied into one message where they are small."""
    copied = num_parameters * FP32_BYTES if num_parameters <= LARGEST_ALL_REDUCE else 0
    narrowed = num_parameters * communication_bytes if communication_bytes < FP32_BYTES else 0
    return float(copied + narrowed)


def _separate_update(number_format: NumberFormat, num_parameters: int, share: float, bucket_bytes: float) -> float:
    """``DeepSpeedZeroOptimizer``: the pipeline engine allocates its gradient buffer a second time to reduce; later the
    device's share of the gradients is widened, when the others are gone."""
    gone = (num_parameters - share) * number_format.gradient_bytes
    return max(2 * bucket_bytes, share * FP32_BYTES - gone)
