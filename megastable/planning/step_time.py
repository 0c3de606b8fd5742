"""The number formats of a run, as DeepSpeed stores its weights and gradients.

What each pipeline stage computes, from the plan of a run.

The cost of a step, from the operations and messages of every stage and the figures of a device.

Computing: a pass's operations at the machine's speed. Sending: the volumes of ring collectives, 2 (n - 1) / n of what
is summed and (n - 1) / n of what is gathered, at the speed of the slowest link on the way, without overlap.
"""

from __future__ import annotations

from megastable.config import RunConfig
from megastable.config.stages import model_parts, model_shape
from megastable.core.flops import BACKWARD_FORWARD_RATIO, ModelShape
from megastable.core.layers import StageLayers, stage_parameters
from megastable.core.layout import ParallelLayout
from megastable.core.memory import NumberFormat
from megastable.core.pipeline_cost import MicroBatchTime, PipelineCost, StageTime
from megastable.planning.machine import Machine
from megastable.planning.run_plan import RunPlan, recomputation

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


def forward_flops_per_sample(shape: ModelShape, stage: StageLayers) -> int:
    """Operations of a stage's forward pass over one sample, all tensor ranks together; a lookup has none."""
    return stage.num_blocks * shape.block_forward_flops + (shape.head_forward_flops if stage.is_last else 0)


SUMS_PER_BLOCK = 2
"""One for each half block, forward; as many backward (Shoeybi et al., arXiv 1909.08053, section 3)."""
UPDATE_TOUCHES_BYTES = 28
"""Of a weight's fp32 state in one Adam update: gradient read; weight and two moments read and written."""


def step_cost(plan: RunPlan, machine: Machine) -> PipelineCost:
    """The cost of the run's steps on its layout."""
    stages = plan.cut.stages
    return PipelineCost(
        stages=tuple(_stage_time(plan, stage, machine) for stage in stages),
        transfer=MicroBatchTime(seconds_per_sample=_seconds_between_stages(plan, machine)),
        fixed_seconds=max(_fixed_seconds(plan, stage, machine) for stage in stages),
    )


def relative_cost(plan: RunPlan) -> PipelineCost:
    """The stages' shares of the work, in operations instead of seconds: enough to tell how long they wait."""
    shape, recomputed = model_shape(plan.run.megastable.model), recomputation(plan.run)
    times = []
    for stage in plan.cut.stages:
        forward = forward_flops_per_sample(shape, stage)
        again = recomputed.flops_per_sample(shape, stage.num_blocks, stage.is_last)
        times.append(_of_sample(forward, BACKWARD_FORWARD_RATIO * forward + again))
    return PipelineCost(tuple(times))


def _of_sample(forward: float, backward: float) -> StageTime:
    return StageTime(MicroBatchTime(seconds_per_sample=forward), MicroBatchTime(seconds_per_sample=backward))


def _stage_time(plan: RunPlan, stage: StageLayers, machine: Machine) -> StageTime:
    settings = plan.run.megastable
    shape, recomputed = model_shape(settings.model), recomputation(plan.run)
    ranks = plan.layout.tensor_parallel_size
    per_flop = machine.seconds_per_flop(plan.run.number_format) / ranks
    forward = forward_flops_per_sample(shape, stage) * per_flop
    backward = BACKWARD_FORWARD_RATIO * forward
    one_sum = _seconds_of_a_tensor_sum(plan, machine)
    sums = SUMS_PER_BLOCK * stage.num_blocks
    forward += (sums + stage.is_first) * one_sum
    backward += (sums + stage.is_last) * one_sum
    if settings.tensor_parallel.sequence_parallel:
        backward += sums * one_sum / 2  # the input of every half block is gathered once more
    backward += recomputed.flops_per_sample(shape, stage.num_blocks, stage.is_last) * per_flop
    backward += recomputed.num_halves * stage.num_blocks * one_sum  # each half block sums once again
    return _of_sample(forward, backward)


def _stream_bytes(plan: RunPlan) -> int:
    """The residual stream of one sample."""
    model = plan.run.megastable.model
    return model.seq_length * model.hidden_size * number_format(plan.run).weight_bytes


def _seconds_of_a_tensor_sum(plan: RunPlan, machine: Machine) -> float:
    ranks = plan.layout.tensor_parallel_size
    return 2 * (ranks - 1) / ranks * _stream_bytes(plan) * _seconds_per_byte(machine, span=ranks)


def _seconds_between_stages(plan: RunPlan, machine: Machine) -> float:
    layout = plan.layout
    sliced = layout.tensor_parallel_size if plan.run.megastable.tensor_parallel.sequence_parallel else 1
    return _stream_bytes(plan) / sliced * _seconds_per_byte(machine, span=layout.world_size)


def _fixed_seconds(plan: RunPlan, stage: StageLayers, machine: Machine) -> float:
    """Gradients summed over the replicas, a share of the weights updated, all of them gathered."""
    settings, layout = plan.run.megastable, plan.layout
    weights = stage_parameters(
        model_shape(settings.model), model_parts(settings.model), stage, layout.tensor_parallel_size
    )
    replicas = layout.data_parallel_size
    travelling = 2 * communication_bytes(plan.run) + number_format(plan.run).weight_bytes
    per_byte = _seconds_per_byte(machine, span=_replica_span(layout))
    seconds = (replicas - 1) / replicas * weights * travelling * per_byte
    if machine.device.memory_gb_per_second is not None:
        seconds += weights / replicas * UPDATE_TOUCHES_BYTES / (machine.device.memory_gb_per_second * 1e9)
    return seconds


def _replica_span(layout: ParallelLayout) -> int:
    """Ranks from the first to the last copy of a stage's weights, which stand side by side."""
    return layout.data_parallel_size * layout.tensor_parallel_size


def _seconds_per_byte(machine: Machine, span: int) -> float:
    """Of the slowest link among ``span`` neighbouring ranks; 0 where it is not known."""
    device = machine.device
    speed = device.node_gb_per_second if span <= device.devices_per_node else device.network_gb_per_second
    return 0.0 if speed is None else 1 / (speed * 1e9)
