"""The machine that a forecast is made for, and what is taken for granted about it."""

from __future__ import annotations

from dataclasses import dataclass

from megastable.core.devices import Device, find_device
from megastable.core.errors import UserError

DEFAULT_EFFICIENCY = 0.45
"""Share of a device's peak that a stage reaches while it computes. BLOOM-176B measured 150 of an A100's 312 TFLOPs at
its full batch, everything counted (0.48)."""
CPU = "cpu"
OUTSIDE_THE_STEPS = "evaluations, checkpoints, restarts and the reading of data are left out"


@dataclass(frozen=True)
class Machine:
    """So many devices of one kind, and how much of their peak is reached."""

    device: Device
    efficiency: float
    on_cpu: bool = False

    @classmethod
    def of(
        cls,
        device: str | None,
        peak_tflops: float | None = None,
        memory_gib: float | None = None,
        efficiency: float = DEFAULT_EFFICIENCY,
    ) -> Machine | None:
        """From the command line; None where no device was named or described.

        A device of the table may be described differently; any other needs both figures.

        Raises:
            UserError: the device is unknown and not described.
        """
        if device is None and peak_tflops is None and memory_gib is None:
            return None
        on_cpu = device is not None and device.lower() == CPU
        if peak_tflops is not None and memory_gib is not None:
            formats = dict.fromkeys(("fp32", "bf16", "fp16"), peak_tflops)
            return cls(Device(device or "device", formats, memory_gib), efficiency, on_cpu)
        if peak_tflops is not None or memory_gib is not None or on_cpu:
            missing = "--peak-tflops" if peak_tflops is None else "--memory-gib"
            also = " and --memory-gib" if memory_gib is None and peak_tflops is None else ""
            raise UserError(f"{missing}{also} must be given to describe the device {device or ''}".rstrip())
        assert device is not None
        return cls(find_device(device), efficiency)

    def seconds_per_flop(self, number_format: str) -> float:
        """Of dense products in the format of the weights."""
        return 1 / (self.efficiency * self.device.peak_tflops[number_format] * 1e12)

    def assumptions(self, number_format: str) -> list[str]:
        """What a reader has to know before believing a number."""
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
