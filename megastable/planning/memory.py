"""The memory that every stage's devices need, at the step of the run that needs most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megastable.config.stages import model_parts, model_shape
from megastable.core.activations import ActivationSettings, activation_bytes
from megastable.core.batch_rampup import Batch
from megastable.core.layers import StageLayers
from megastable.core.memory import GIB, MemoryUse, memory_use, reduce_bucket_elements
from megastable.planning.number_formats import communication_bytes, number_format
from megastable.planning.run_plan import RunPlan

STATE_BYTES = 12
"""Of a parameter: master weight and both moments in fp32."""


def stage_memory(plan: RunPlan, on_cpu: bool, batches: Sequence[Batch] | None = None) -> list[MemoryUse]:
    """Count the memory of one device of every stage, from the first to the last.

    Args:
        on_cpu: the devices are processes of a CPU, whose kernels keep more than a GPU's.
        batches: of the steps that are looked at; None for the run's own.
    """
    if batches is None:
        batches = [phase.batch for phase in plan.phases]
    settings = activation_settings(plan, on_cpu)
    return [_memory_of_stage(plan, batches, number, stage, settings) for number, stage in enumerate(plan.cut.stages)]


def fullest_stage(plan: RunPlan, on_cpu: bool, batch: Batch) -> tuple[int, float]:
    """Find the stage whose devices need most at a step of ``batch``, the first of equals, and count their bytes."""
    # Of stages with the same layers the first has most micro-batches in flight, so that the others need no more.
    firsts: dict[StageLayers, int] = {}
    for number, stage in enumerate(plan.cut.stages):
        firsts.setdefault(stage, number)
    settings = activation_settings(plan, on_cpu)
    totals = {
        number: _memory_of_stage(plan, [batch], number, stage, settings).total for stage, number in firsts.items()
    }
    fullest = max(totals, key=lambda number: totals[number])
    return fullest, totals[fullest]


@dataclass(frozen=True)
class HostCopies:
    """The copies of the optimizer's state that a process of the fullest stage holds in host memory."""

    uses: tuple[str, ...]
    """What each of them is for."""
    bytes_each: int

    @property
    def total_bytes(self) -> int:
        """Return the bytes of all copies together."""
        return self.bytes_each * len(self.uses)

    def __str__(self) -> str:
        """Describe them in a line."""
        if not self.uses:
            return "host memory: no copy of the state"
        each = self.bytes_each / GIB
        return f"host memory: {self.total_bytes / GIB:.3g} GiB a process; {each:.3g} for each of {', '.join(self.uses)}"


def host_copies(plan: RunPlan) -> HostCopies:
    """List the copies of the state that a run holds in host memory, and count their bytes."""
    settings = plan.run.megastable
    uses = []
    if settings.checkpoint.asynchronous:
        # A run that never saves by itself does so where the file SAVE asks for it.
        asked = " where the file SAVE asks for one" if settings.checkpoint.save_interval is None else ""
        uses.append(f"a save in the background{asked}")
    if settings.stability.guard == "rollback":
        interval = settings.stability.snapshot_interval
        uses += [
            "the last good state",
            f"a state on trial (a copy every {interval:,} steps, timed in snapshot_seconds)",
        ]
    most_parameters = max(plan.stage_parameters(stage) for stage in plan.cut.stages)
    held = -(-most_parameters // plan.layout.data_parallel_size)
    return HostCopies(tuple(uses), STATE_BYTES * held)


def _memory_of_stage(
    plan: RunPlan, batches: Sequence[Batch], number: int, stage: StageLayers, settings: ActivationSettings
) -> MemoryUse:
    run = plan.run
    model = run.megastable.model
    shape, parts = model_shape(model), model_parts(model)
    # Memory grows with the number of micro-batches, so of every micro-batch size one step is enough to look at.
    most_of_size: dict[int, int] = {}
    for batch in batches:
        size = batch.micro_batch_size
        most_of_size[size] = max(most_of_size.get(size, 0), batch.num_microbatches)
    # 1F1B holds one micro-batch for every stage from this one to the last, so that the first stage holds most.
    most_in_flight = plan.layout.num_stages - number
    activations = max(
        activation_bytes(shape, parts, stage, settings, size, min(most_in_flight, num_microbatches))
        for size, num_microbatches in most_of_size.items()
    )
    # Stages differ in weights as well: the first and last hold an embedding each, tied or not.
    num_parameters = plan.stage_parameters(stage)
    return memory_use(
        number_format(run),
        num_parameters=num_parameters,
        data_parallel_size=plan.layout.data_parallel_size,
        reduce_bucket_size=reduce_bucket_elements(run.zero_optimization.reduce_bucket_size, num_parameters),
        communication_bytes=communication_bytes(run),
        activations=activations,
    )


def activation_settings(plan: RunPlan, on_cpu: bool) -> ActivationSettings:
    """Gather what of the run file decides how much is kept for the backward pass."""
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
        resets_at_documents=settings.data.resets_at_documents,
        fp32_sums_at_once=sums.flat_fp32_sums and run.bf16.immediate_grad_update,
    )
