"""Measures every layer and rank during a step that is watched, and gathers it with two collectives."""

from __future__ import annotations

import math
import os
from typing import Any

import psutil
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from megastable.config import RunConfig
from megastable.core.layers import LayerKind
from megastable.core.memory import GIB
from megastable.core.records import Watched
from megastable.engine.flat_partitions import FlatPartition
from megastable.engine.instructions import BusyTime
from megastable.engine.layer_statistics import (
    ACTIVATION,
    ATTENTION_LOGIT,
    ELEMENTS,
    GRADIENT,
    UPDATE,
    WEIGHT,
    ZEROS,
    ActivationStatistics,
    UpdateStatistics,
)
from megastable.engine.pipeline_module import GptPipeline


class LayerWatch:
    """Measures between ``begin`` before a step and ``finish`` after it, both called on every rank.

    Args:
        engine: DeepSpeed's engine, whose module and optimizer are measured once ``attach_hooks`` was called.
        busy: the clock of the passes in the table of instructions.
    """

    def __init__(self, engine: Any, partitions: list[FlatPartition], busy: BusyTime, run: RunConfig) -> None:
        module: GptPipeline = engine.module
        self._module = module
        self._names = module.layer_names
        self._num_stages = run.megastable.pipeline.num_stages
        self._blocks = [kind is LayerKind.BLOCK for kind in module.layer_kinds]
        self._format_maximum = torch.finfo(next(module.parameters()).dtype).max
        self._updates = UpdateStatistics(module, engine.optimizer, partitions, len(self._names), run.clip_norm)
        self._activations = ActivationStatistics(len(self._names), engine.device)
        self._busy = busy
        self._parts = (self._updates, self._activations, self._busy)

    def attach_hooks(self) -> None:
        """Hook into the layers of the stage and into the optimizer; outside watched steps the hooks do nothing."""
        self._updates.attach_hooks()
        self._activations.attach_hooks(self._module, self._module.first_layer)

    def begin(self) -> None:
        """Forget what was measured before, and measure the next step."""
        for part in self._parts:
            part.clear()
            part.enabled = True

    def finish(self, step_seconds: float) -> Watched:
        """Stop measuring, and gather what all ranks measured; collective."""
        for part in self._parts:
            part.enabled = False
        sums, (busy, host_memory, unshared_memory) = self._summed()
        maxima, device_memory, longest = self._largest(step_seconds)
        slowest_rank = max(range(len(busy)), key=busy.__getitem__)
        # Headroom: how much of the largest number of the format is used, by the layer that uses most of it.
        shares = [max(row) / self._format_maximum for row in maxima]
        fullest = max(range(len(shares)), key=shares.__getitem__)
        return Watched(
            layers={name: self._values(sums[i], maxima[i], self._blocks[i]) for i, name in enumerate(self._names)},
            headroom=shares[fullest],
            headroom_layer=self._names[fullest],
            slowest_rank=slowest_rank,
            slowest_rank_share=busy[slowest_rank] / longest,
            stage_busy_seconds=self._by_stage(busy),
            host_memory_gib=max(host_memory) / GIB,
            device_memory_gib=device_memory / GIB if device_memory else None,
            rank_busy_seconds=tuple(busy),
            rank_host_memory_gib=tuple(own / GIB for own in unshared_memory),
        )

    def _summed(self) -> tuple[list[list[float]], list[list[float]]]:
        """Sum over all ranks.

        Returns:
            Per layer the columns of ``UpdateStatistics``; of each rank the busy seconds, and the bytes of its process.
        """
        own = self._updates.sums
        # Each rank fills its own place, so the sum collects them, in the collective that is needed anyway.
        ranks = own.new_zeros(3, dist.get_world_size())
        memory = psutil.Process(os.getpid()).memory_info()
        # Pages of a mapped file of tokens are resident, too, the more of them were read; only Linux tells them apart.
        unshared = memory.rss - getattr(memory, "shared", 0)
        ranks[:, dist.get_rank()] = own.new_tensor([self._busy.seconds, memory.rss, unshared])
        together = torch.cat([own.flatten(), ranks.flatten()])
        dist.all_reduce(together)
        of_ranks: list[list[float]] = together[own.numel() :].view_as(ranks).tolist()
        return together[: own.numel()].view_as(own).tolist(), of_ranks

    def _by_stage(self, busy: list[float]) -> dict[str, float]:
        """Average over the ranks of every stage, which are neighbours, see ``core.layout``."""
        size = len(busy) // self._num_stages
        return {f"stage_{n}": sum(busy[n * size : (n + 1) * size]) / size for n in range(self._num_stages)}

    def _largest(self, step_seconds: float) -> tuple[list[list[float]], float, float]:
        """Take the maximum over all ranks.

        Returns:
            Per layer the columns of ``ActivationStatistics``, device memory in bytes, the seconds of the step.
        """
        own = self._activations.maxima
        on_device = 0.0
        if own.device.type != "cpu":
            on_device = float(get_accelerator().max_memory_allocated())
        together = torch.cat([own.flatten(), own.new_tensor([on_device, step_seconds])])
        dist.all_reduce(together, op=dist.ReduceOp.MAX)
        device_memory, longest = together[own.numel() :].tolist()
        return together[: own.numel()].view_as(own).tolist(), device_memory, longest

    def _values(self, sums: list[float], maxima: list[float], is_block: bool) -> dict[str, float]:
        """Name the values of one layer."""
        values = {"max_activation": maxima[ACTIVATION]}
        if is_block:
            values["max_attention_logit"] = maxima[ATTENTION_LOGIT]
        # No elements: a layer without parameters or of tied ones, which count elsewhere, or a step that was skipped.
        if sums[ELEMENTS]:
            weight = math.sqrt(sums[WEIGHT])
            update = math.sqrt(sums[UPDATE])
            values |= {
                "grad_norm": math.sqrt(sums[GRADIENT]),
                "weight_norm": weight,
                "update_norm": update,
                "update_ratio": update / weight if weight else 0.0,  # of zero weights, such as fresh biases
                "grad_zero_share": sums[ZEROS] / sums[ELEMENTS],
            }
        return values
