"""The limit: a plain loop over the micro-batches of the whole model, on one process with as many threads as stages."""

from __future__ import annotations

import torch
import torch.distributed as dist
from gpt import NUM_STAGES, GlobalBatch, Settings, build_layers, loss_function
from mixed_precision import MasterWeightAdamW


class OneProcess:
    """Rank 0 trains; the others do nothing and wait for the next step, without taking its processor."""

    def __init__(self, settings: Settings, bounds: list[int]) -> None:
        self._loss = loss_function()
        if dist.get_rank() == 0:
            self._model = build_layers(settings, bounds[0], bounds[-1])
            self._optimizer = MasterWeightAdamW(self._model.parameters(), settings.run(), shared=False)

    def refusal(self, num_micro_batches: int) -> str | None:
        """Return None: every number of micro-batches will do."""
        return None

    def step(self, batch: GlobalBatch) -> float | None:
        """Take one optimizer step; returns the loss on rank 0."""
        if dist.get_rank() != 0:
            return None
        torch.set_num_threads(NUM_STAGES)
        total = torch.zeros(())
        for ids, targets in batch.micro_batches():
            loss = self._loss(self._model(ids), targets) / batch.num_micro_batches
            loss.backward()
            total += loss.detach()
        self._optimizer.step()
        torch.set_num_threads(1)
        return float(total)
