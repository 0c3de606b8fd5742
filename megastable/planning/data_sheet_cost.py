"""The cost of a run's steps from a device's data sheet, before anything has been measured.

A pass takes its operations at a share of the device's peak (``Machine``). A message takes its bytes at the speed of the
slowest link on its way, without overlap; a ring of n ranks sends 2 (n - 1) / n of what it sums and (n - 1) / n of what
it gathers. ``core.pipeline_cost`` plays these costs through the pipeline's schedule.
"""

from __future__ import annotations

from dataclasses import dataclass

from megastable.config.stages import model_shape
from megastable.core.devices import Device, find_device
from megastable.core.errors import UserError
from megastable.core.flops import BACKWARD_FORWARD_RATIO, ModelShape
from megastable.core.layers import StageLayers
from megastable.core.pipeline_cost import MicroBatchTime, PipelineCost, StageTime
from megastable.planning.number_formats import BYTES, stream_bytes, update_bytes_sent
from megastable.planning.run_plan import RunPlan, recomputation

DEFAULT_EFFICIENCY = 0.45
"""Share of a device's peak that a stage reaches while it computes. BLOOM-176B measured 150 of an A100's 312 TFLOPs at
its full batch, everything counted (0.48)."""
CPU = "cpu"
OUTSIDE_THE_STEPS = "evaluations, checkpoints, restarts and the reading of data are left out"
SUMS_PER_BLOCK = 2
"""Sums over the tensor ranks in a block's forward pass, one for each half; its backward pass has as many (Shoeybi et
al., arXiv 1909.08053, section 3)."""
UPDATE_TOUCHES_BYTES = 28
"""Bytes of a weight's fp32 state that one Adam update reads or writes: its gradient is read, the weight and two moments
are read and written."""


@dataclass(frozen=True)
class Machine:
    """Devices of one kind, and the share of their peak that a run reaches."""

    device: Device
    efficiency: float
    on_cpu: bool = False

    @classmethod
    def of(
        cls,
        device: str | None,
        peak_tflops: float | None = None,
        memory_gib: float | None = None,
        efficiency: float | None = None,
    ) -> Machine | None:
        """Find or describe the machine of a command line; return None where it names and describes no device.

        A device of the table may be described differently; any other needs both figures.

        Args:
            efficiency: share of the peak; None for ``DEFAULT_EFFICIENCY``.

        Raises:
            UserError: the device is unknown and not described.
        """
        if device is None and peak_tflops is None and memory_gib is None:
            return None
        if efficiency is None:
            efficiency = DEFAULT_EFFICIENCY
        on_cpu = device is not None and device.lower() == CPU

        if peak_tflops is not None and memory_gib is not None:
            # One figure is all that is known of a described device, so every format has the same peak.
            peaks = dict.fromkeys(BYTES, peak_tflops)
            return cls(Device(device or "device", peaks, memory_gib), efficiency, on_cpu)

        missing = []
        if peak_tflops is None:
            missing.append("--peak-tflops")
        if memory_gib is None:
            missing.append("--memory-gib")
        # Half a description is a slip, and no data sheet describes all CPUs.
        if len(missing) == 1 or on_cpu:
            what = f"{' and '.join(missing)} must be given to describe the device {device or ''}"
            raise UserError(what.rstrip())
        assert device is not None
        return cls(find_device(device), efficiency)

    def seconds_per_flop(self, number_format: str) -> float:
        """Return the seconds of one operation of a matrix product in the format of the weights."""
        return 1 / (self.efficiency * self.device.peak_tflops[number_format] * 1e12)

    def seconds_per_byte(self, span: int) -> float:
        """Return the seconds of a byte on the slowest link among ``span`` neighbouring ranks; 0 where it is unknown."""
        device = self.device
        speed = device.node_gb_per_second if span <= device.devices_per_node else device.network_gb_per_second
        return 0.0 if speed is None else 1 / (speed * 1e9)

    def assumptions(self, number_format: str) -> list[str]:
        """List, for people, what the predicted times rest on."""
        device = self.device
        peak = device.peak_tflops[number_format]
        lines = [
            f"a stage computes at {self.efficiency:.0%} of the {peak:g} TFLOPs of {device.name} in {number_format} "
            f"({device.source}), at every micro-batch size; measure a few steps and set --efficiency",
            OUTSIDE_THE_STEPS,
        ]
        if device.node_gb_per_second is None or device.network_gb_per_second is None:
            lines.append("what is sent between devices takes no time: the links of this device are not known")
        else:
            lines.append(
                f"links carry {device.node_gb_per_second:g} GB/s within a node of {device.devices_per_node} and "
                f"{device.network_gb_per_second:g} GB/s between nodes, and no transfer overlaps with computing"
            )
        return lines


def step_cost(plan: RunPlan, machine: Machine) -> PipelineCost:
    """Compute the cost of the run's steps, in seconds, on its layout of the machine's devices."""
    stages = plan.cut.stages
    # Most stages hold the same layers.
    times = {stage: _stage_time(plan, stage, machine) for stage in set(stages)}
    return PipelineCost(
        stages=tuple(times[stage] for stage in stages),
        transfer=MicroBatchTime(seconds_per_sample=_seconds_between_stages(plan, machine)),
        # All stages begin their updates together, and the step ends with the last of them.
        fixed_seconds=max(_update_seconds(plan, stage, machine) for stage in times),
    )


def relative_cost(plan: RunPlan) -> PipelineCost:
    """Compute the stages' shares of the work, in operations in place of seconds.

    They are enough to tell which share of its time a stage waits, and how measured seconds divide among the stages.
    """
    shape = model_shape(plan.run.megastable.model)
    recomputed = recomputation(plan.run)
    times = []
    for stage in plan.cut.stages:
        forward = forward_flops_per_sample(shape, stage)
        again = recomputed.flops_per_sample(shape, stage.num_blocks, stage.is_last)
        times.append(_time_per_sample(forward, BACKWARD_FORWARD_RATIO * forward + again))
    return PipelineCost(tuple(times))


def forward_flops_per_sample(shape: ModelShape, stage: StageLayers) -> int:
    """Count the operations of a stage's forward pass over one sample, over all tensor ranks; a lookup has none."""
    flops = stage.num_blocks * shape.block_forward_flops
    if stage.is_last:
        flops += shape.head_forward_flops
    return flops


def _time_per_sample(forward: float, backward: float) -> StageTime:
    """Return passes whose time grows with the samples alone: a data sheet gives a micro-batch no cost of its own."""
    return StageTime(MicroBatchTime(seconds_per_sample=forward), MicroBatchTime(seconds_per_sample=backward))


def _stage_time(plan: RunPlan, stage: StageLayers, machine: Machine) -> StageTime:
    """Compute what a stage's passes take: products, sums over the tensor ranks, and what is computed again."""
    settings = plan.run.megastable
    shape = model_shape(settings.model)
    recomputed = recomputation(plan.run)
    seconds_per_flop = machine.seconds_per_flop(plan.run.number_format) / plan.layout.tensor_parallel_size

    forward = forward_flops_per_sample(shape, stage) * seconds_per_flop
    backward = BACKWARD_FORWARD_RATIO * forward

    one_sum = _seconds_of_a_tensor_sum(plan, machine)
    sums = SUMS_PER_BLOCK * stage.num_blocks
    # The first stage also sums the rows that the tensor ranks looked up; the last, the gradient of the head's input.
    forward += (sums + stage.is_first) * one_sum
    backward += (sums + stage.is_last) * one_sum
    if settings.tensor_parallel.sequence_parallel:
        # The input of every half block was kept in slices and is gathered once more, which is half of a sum.
        backward += sums * one_sum / 2

    # Recomputation runs in the backward pass, where each half block needs its sum over the tensor ranks again.
    backward += recomputed.flops_per_sample(shape, stage.num_blocks, stage.is_last) * seconds_per_flop
    backward += recomputed.num_halves * stage.num_blocks * one_sum
    return _time_per_sample(forward, backward)


def _seconds_of_a_tensor_sum(plan: RunPlan, machine: Machine) -> float:
    """Compute the seconds in which the tensor ranks sum the residual stream of one sample."""
    ranks = plan.layout.tensor_parallel_size
    return 2 * (ranks - 1) / ranks * stream_bytes(plan) * machine.seconds_per_byte(span=ranks)


def _seconds_between_stages(plan: RunPlan, machine: Machine) -> float:
    """Compute the seconds in which one sample's residual stream goes to a neighbouring stage."""
    layout = plan.layout
    # With sequence parallelism every tensor rank sends its own slice.
    slices = layout.tensor_parallel_size if plan.run.megastable.tensor_parallel.sequence_parallel else 1
    # The slowest pair of neighbours sets the pace, so the link is that between nodes unless one node holds the run.
    return stream_bytes(plan) / slices * machine.seconds_per_byte(span=layout.world_size)


def _update_seconds(plan: RunPlan, stage: StageLayers, machine: Machine) -> float:
    """Compute the seconds of a stage's update: gradients summed, the replica's share updated, weights gathered."""
    layout = plan.layout
    # Copies of a stage's weights stand side by side, each with its tensor ranks.
    replica_span = layout.data_parallel_size * layout.tensor_parallel_size
    seconds = update_bytes_sent(plan, stage) * machine.seconds_per_byte(replica_span)
    if machine.device.memory_gb_per_second is not None:
        # Adam does a few operations a byte, so the memory's speed bounds it.
        share = plan.stage_parameters(stage) / layout.data_parallel_size
        seconds += share * UPDATE_TOUCHES_BYTES / (machine.device.memory_gb_per_second * 1e9)
    return seconds
