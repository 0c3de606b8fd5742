"""Bytes on one device of a run under DeepSpeed's ZeRO-1, by kind.

They are counted from ``engine.weight_update`` and from DeepSpeed 0.19.8's optimizers: ``DeepSpeedZeroOptimizer`` (fp32,
fp16, bf16) and ``BF16_Optimizer`` (bf16, fp32 sums). Both keep an fp32 copy of their share of the weights, in an fp32
run as well.
"""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30
"""Bytes of a GiB, in which memory is shown and given."""
FP32_BYTES = 4
MOMENTS = 2
"""Adam's running means: of the gradient and of its square."""
LARGEST_ALL_REDUCE = 500_000_000
"""Elements that DeepSpeed's pipeline engine flattens into one gradient message."""
LARGEST_REDUCE_BUCKET = 500_000_000
"""Elements of the buffer in which ZeRO gathers gradients to reduce them: DeepSpeed's own default. It bounds the memory
of a large stage, whose gradients would otherwise all stand in the buffer a second time."""
COPIES_CHECK_BYTES = 8 * 2**20
"""What ``engine.consistency`` keeps to compare copies with, whatever the model."""


@dataclass(frozen=True)
class NumberFormat:
    """Bytes that a run's formats take for each weight.

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
        """Return the peak: the state, and the larger of what the backward passes and the update need beside it."""
        state = self.weights + self.gradients + self.master_weights + self.moments
        return state + max(self.activations + self.buffers, self.update)

    def by_kind(self) -> dict[str, int]:
        """Return whole bytes of every kind, and the peak as ``total``."""
        kinds = ("weights", "gradients", "master_weights", "moments", "activations", "buffers", "update", "total")
        return {kind: round(getattr(self, kind)) for kind in kinds}


def reduce_bucket_elements(configured: int | None, num_parameters: int) -> int:
    """Return the elements of ZeRO's gradient buffer on a rank that holds ``num_parameters`` weights.

    DeepSpeed allocates the whole buffer in every step, so that a model smaller than the default size gets a buffer of
    its own size.

    Args:
        configured: ``zero_optimization.reduce_bucket_size`` of the run file; None where it leaves the choice.
    """
    return configured or min(num_parameters, LARGEST_REDUCE_BUCKET)


def memory_use(
    number_format: NumberFormat,
    num_parameters: int,
    data_parallel_size: int,
    reduce_bucket_size: int,
    communication_bytes: int,
    activations: float,
) -> MemoryUse:
    """Compute what a device needs that holds ``num_parameters`` weights.

    Args:
        reduce_bucket_size: elements of ZeRO's gradient buffer.
        communication_bytes: bytes of a number in the format in which gradients travel.
        activations: bytes, see ``core.activations.activation_bytes``.
    """
    share = num_parameters / data_parallel_size
    # A single replica reduces nothing, see ``engine.weight_update``: it has no buffer and sends no message.
    single = data_parallel_size == 1
    if number_format.flat_fp32_sums:
        bucket = 0
        update = 0.0 if single else _flat_update(num_parameters, communication_bytes)
    else:
        bucket = 0 if single else reduce_bucket_size * communication_bytes
        update = _separate_update(number_format, num_parameters, share, bucket)
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
    """Compute the bytes of an update by ``BF16_Optimizer``, which reduces two flat tensors: matrices and vectors."""
    copied = 0
    if num_parameters <= LARGEST_ALL_REDUCE:
        copied = num_parameters * FP32_BYTES  # both tensors go into one message; larger ones are sent where they are
    narrowed = 0
    if communication_bytes < FP32_BYTES:
        narrowed = num_parameters * communication_bytes
    return float(copied + narrowed)


def _separate_update(number_format: NumberFormat, num_parameters: int, share: float, bucket_bytes: float) -> float:
    """Compute the bytes of an update by ``DeepSpeedZeroOptimizer``: the larger of its two widest moments."""
    # To reduce, the pipeline engine allocates the gradient buffer a second time.
    reducing = 2 * bucket_bytes
    # Later the device's share of the gradients is widened to fp32, when those of other devices have been freed.
    freed = (num_parameters - share) * number_format.gradient_bytes
    widening = share * FP32_BYTES - freed
    return max(reducing, widening)
