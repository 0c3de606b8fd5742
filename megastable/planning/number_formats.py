"""The number formats of a run, and the bytes that its messages take in them.

Both the times (``data_sheet_cost``, ``measured_cost``) and the memory (``memory``) of a forecast count in these bytes.
"""

from __future__ import annotations

from megastable.config import RunConfig
from megastable.core.layers import StageLayers
from megastable.core.memory import NumberFormat
from megastable.planning.run_plan import RunPlan

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
FORMATS: dict[tuple[str, str], NumberFormat] = {
    ("fp32", "fp32"): NumberFormat(weight_bytes=4, gradient_bytes=4),
    ("bf16", "bf16"): NumberFormat(weight_bytes=2, gradient_bytes=2),
    ("fp16", "fp16"): NumberFormat(weight_bytes=2, gradient_bytes=2),
    # BF16_Optimizer adds each gradient to one flat fp32 tensor, and drops the bf16 gradient at once.
    ("bf16", "fp32"): NumberFormat(weight_bytes=2, gradient_bytes=4, flat_fp32_sums=True),
    # DeepSpeedZeroOptimizer keeps an fp32 sum beside every fp16 gradient.
    ("fp16", "fp32"): NumberFormat(weight_bytes=2, gradient_bytes=6),
}
"""(Format of the weights, format of the sums of their gradients) -> bytes of both."""
BF16_GRADIENTS_KEPT = NumberFormat(weight_bytes=2, gradient_bytes=6, flat_fp32_sums=True)
"""bf16 whose gradients are added to their fp32 sums only after a whole micro-batch, and are kept until then:
``bf16.immediate_grad_update`` is false."""


def number_format(run: RunConfig) -> NumberFormat:
    """Return the bytes of the run's weights and of what it keeps of their gradients."""
    found = FORMATS[run.number_format, sums_format(run)]
    if found.flat_fp32_sums and not run.bf16.immediate_grad_update:
        return BF16_GRADIENTS_KEPT
    return found


def sums_format(run: RunConfig) -> str:
    """Return the format in which the gradients of a step's micro-batches are summed."""
    return run.data_types.grad_accum_dtype or run.number_format


def communication_bytes(run: RunConfig) -> int:
    """Return the bytes of one gradient on its way between replicas; ``engine.deepspeed_config`` sets its format."""
    travels_in = run.communication_data_type
    if travels_in is None:
        # Sums in fp32 are not rounded to 16 bits to be sent: that would lose what they were kept in fp32 for.
        travels_in = "fp32" if sums_format(run) == "fp32" else run.number_format
    return BYTES[travels_in]


def stream_bytes(plan: RunPlan) -> int:
    """Return the bytes of the residual stream of one sample: the message between two stages."""
    # Activations are in the format of the weights; the gradient that comes back has the same shape and format.
    model = plan.run.megastable.model
    return model.seq_length * model.hidden_size * number_format(plan.run).weight_bytes


def update_bytes_sent(plan: RunPlan, stage: StageLayers) -> float:
    """Compute the bytes that each device of a stage sends to the stage's replicas for one update under ZeRO-1.

    A ring of n replicas sends 2 (n - 1) / n of the gradients to sum them, and (n - 1) / n of the weights to gather the
    updated shares.
    """
    # The update itself is of fp32 master weights, but what is gathered are the weights that the passes use.
    replicas = plan.layout.data_parallel_size
    bytes_per_weight = 2 * communication_bytes(plan.run) + number_format(plan.run).weight_bytes
    return (replicas - 1) / replicas * plan.stage_parameters(stage) * bytes_per_weight
