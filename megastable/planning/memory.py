"""What every stage's devices need, at the step of the run that needs most."""

from __future__ import annotations

from collections.abc import Sequence

from megastable.config.stages import model_parts, model_shape
from megastable.core.activations import ActivationSettings, activation_bytes
from megastable.core.batch_rampup import Batch
from megastable.core.layers import StageLayers, stage_parameters
from megastable.core.memory import MemoryUse, memory_use
from megastable.planning.run_plan import RunPlan
from megastable.planning.step_time import communication_bytes, number_format

LARGEST_BUCKET = 500_000_000
"""Elements of the gradient buffer of a large stage; a smaller one has a buffer of its own size, see the engine."""


def stage_memory(plan: RunPlan, on_cpu: bool, batches: Sequence[Batch] | None = None) -> list[MemoryUse]:
    """Of one device of every stage, from the first to the last.

    Args:
        on_cpu: the devices are processes of a CPU, whose kernels keep more than a GPU's.
        batches: of the steps that are looked at; None for the run's own.
    """
    if batches is None:
        batches = [phase.batch for phase in plan.phases]
    return [_memory_of_stage(plan, batches, number, stage, on_cpu) for number, stage in enumerate(plan.cut.stages)]


def _memory_of_stage(
    plan: RunPlan, batches: Sequence[Batch], number: int, stage: StageLayers, on_cpu: bool
) -> MemoryUse:
    run, model, layout = plan.run, plan.run.megastable.model, plan.layout
    shape, parts, ranks = model_shape(model), model_parts(model), layout.tensor_parallel_size
    weights = stage_parameters(shape, parts, stage, ranks)
    settings = activation_settings(plan, on_cpu)
    # Of every micro-batch size the step with most micro-batches needs most.
    counts: dict[int, int] = {}
    for batch in batches:
        size, count = batch.micro_batch_size, batch.num_microbatches
        counts[size] = max(counts.get(size, 0), count)
    widest = max(
        activation_bytes(shape, parts, stage, settings, size, min(layout.num_stages - number, count))
        for size, count in counts.items()
    )
    return memory_use(
        number_format(run),
        num_parameters=weights,
        data_parallel_size=layout.data_parallel_size,
        reduce_bucket_size=run.zero_optimization.reduce_bucket_size or min(weights, LARGEST_BUCKET),
        communication_bytes=communication_bytes(run),
        activations=widest,
    )


def activation_settings(plan: RunPlan, on_cpu: bool) -> ActivationSettings:
    """What of the run file decides how much is kept for the backward pass."""
    run, settings = plan.run, plan.run.megastable
    model = settings.model
    sums = number_format(run)
    return ActivationSettings(
        element_bytes=sums.weight_bytes,
        recomputed=settings.pipeline.recomputed_kinds,
        loss_chunk_tokens=settings.training.loss_chunk_tokens,
        tensor_parallel_size=plan.layout.tensor_parallel_size,
        sequence_parallel=settings.tensor_parallel.sequence_parallel,
        dropout=model.dropout > 0,
        attention_logit_cap=model.attention_logit_cap is not None,
        output_logit_cap=model.output_logit_cap is not None,
        on_cpu=on_cpu,
        fp32_sums_at_once=sums.flat_fp32_sums and run.bf16.immediate_grad_update,
    )
