"""Where DeepSpeed's two ZeRO 1 optimizers keep this rank's fp32 master weights."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def flat_partitions(optimizer: Any) -> list[tuple[Tensor, list[Any]]]:
    """For each parameter group, this rank's flat fp32 partition and all parameters of the group.

    A parameter with a part in the partition has ``_hp_mapping``: where that part lies in it, and in the parameter.
    """
    if hasattr(optimizer, "single_partition_of_fp32_groups"):  # DeepSpeedZeroOptimizer
        return list(zip(optimizer.single_partition_of_fp32_groups, optimizer.bit16_groups, strict=True))
    return list(zip(optimizer.fp32_groups_flat_partition, optimizer.bf16_groups, strict=True))  # BF16_Optimizer
