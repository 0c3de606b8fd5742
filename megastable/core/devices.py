"""What devices can do at best, from their makers' data sheets."""

from __future__ import annotations

from dataclasses import dataclass

from megastable.core.errors import UserError
from megastable.core.memory import GIB

GPU_RESERVED_GIB = 2.0
"""What driver, libraries and communication take of a GPU: a round figure, not measured."""


@dataclass(frozen=True)
class Device:
    """Describes one accelerator and its links.

    Attributes:
        peak_tflops: number format -> 10^12 operations a second of dense matrix products. fp32 without TF32, as torch
            has it by default.
        memory_gib: as the driver reports it, all of it.
        reserved_gib: of that, what the driver, the libraries and the communication take.
        memory_gb_per_second: of its own memory; None: unknown, the optimizer's pass over it is then left out.
        node_gb_per_second: from one device to its node's others, one direction; None: unknown, left out.
        network_gb_per_second: from one device to another node, one direction; None: unknown, left out.
        devices_per_node: how many have the fast links.
    """

    name: str
    peak_tflops: dict[str, float]
    memory_gib: float
    reserved_gib: float = 0.0
    memory_gb_per_second: float | None = None
    node_gb_per_second: float | None = None
    network_gb_per_second: float | None = None
    devices_per_node: int = 8
    source: str = "given on the command line"

    @property
    def usable_bytes(self) -> float:
        """Return the bytes that are left for training."""
        return (self.memory_gib - self.reserved_gib) * GIB


DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        Device(
            name="A100",
            peak_tflops={"bf16": 312.0, "fp16": 312.0, "fp32": 19.5},
            memory_gib=79.1,
            reserved_gib=GPU_RESERVED_GIB,
            memory_gb_per_second=2039.0,
            node_gb_per_second=300.0,
            network_gb_per_second=25.0,
            source="NVIDIA A100 80GB SXM data sheet (NVLink 600 GB/s both ways); one 200 Gb/s port a device, as in a "
            "DGX A100",
        ),
        Device(
            name="H100",
            peak_tflops={"bf16": 989.4, "fp16": 989.4, "fp32": 66.9},
            memory_gib=79.1,
            reserved_gib=GPU_RESERVED_GIB,
            memory_gb_per_second=3352.0,
            node_gb_per_second=450.0,
            network_gb_per_second=50.0,
            source="NVIDIA H100 SXM data sheet (NVLink 900 GB/s both ways); one 400 Gb/s port each, as in a DGX H100",
        ),
        Device(
            name="H200",
            peak_tflops={"bf16": 989.4, "fp16": 989.4, "fp32": 66.9},
            memory_gib=139.8,
            reserved_gib=GPU_RESERVED_GIB,
            memory_gb_per_second=4800.0,
            node_gb_per_second=450.0,
            network_gb_per_second=50.0,
            source="NVIDIA H200 SXM data sheet (NVLink 900 GB/s both ways); one 400 Gb/s port each, as in a DGX H200",
        ),
    )
}
"""Device by its name. GPUs keep 2 GiB for the driver and NCCL: BLOOM's log names 1.6 GB of kernels alone on an A100."""


def find_device(name: str) -> Device:
    """Look up a device of the table, in upper or lower case.

    Raises:
        UserError: the table has no device of that name.
    """
    try:
        return DEVICES[name.upper()]
    except KeyError:
        raise UserError(
            f"--device {name}: must be one of {', '.join(DEVICES)}; describe any other by --peak-tflops and "
            "--memory-gib"
        ) from None
