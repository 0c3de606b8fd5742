"""torch.distributed.pipelining, under its 1F1B schedule and under its zero-bubble V schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from gpt import NUM_STAGES, GlobalBatch, Settings, build_layers, loss_function
from mixed_precision import MasterWeightAdamW
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleZBVZeroBubble

from megastable.core.partition import stage_bounds
from megastable.planning.run_plan import RunPlan

TorchLoss = Callable[[Tensor, Tensor], Tensor]


class TorchPipelining:
    """Stages of plain torch on this rank, driven by one of torch's schedules.

    Args:
        bounds: of all stages, as ``stage_bounds`` gives them.
        own: this rank's stages, in order.
        splits_backward: see ``build_layers``.
    """

    def __init__(
        self, settings: Settings, bounds: Sequence[int], own: list[int], splits_backward: bool = False
    ) -> None:
        self._settings = settings
        self._num_stages = len(bounds) - 1
        self._modules = {
            stage: build_layers(settings, bounds[stage], bounds[stage + 1], splits_backward) for stage in own
        }
        parameters = nn.ModuleList(self._modules.values()).parameters()
        self._optimizer = MasterWeightAdamW(parameters, settings.run(), shared=True)
        self._loss = loss_function()
        self._schedules: dict[int, Any] = {}

    def refusal(self, num_micro_batches: int) -> str | None:
        """Say why this number of micro-batches cannot be run; None where it can."""
        raise NotImplementedError

    def make_schedule(self, stages: list[PipelineStage], num_micro_batches: int, loss: TorchLoss) -> Any:
        """Make torch's schedule over this rank's stages."""
        raise NotImplementedError

    def step(self, batch: GlobalBatch) -> float | None:
        """Take one optimizer step; returns the loss on the rank of the last stage."""
        count = batch.num_micro_batches
        if count not in self._schedules:
            self._schedules[count] = self._schedule(count)
        losses: list[Tensor] = []
        has_first = 0 in self._modules
        has_last = self._num_stages - 1 in self._modules
        # A schedule takes the ids on the first stage alone, labels and losses on the last.
        inputs = (batch.ids,) if has_first else ()
        outputs = {"target": batch.labels, "losses": losses} if has_last else {}
        self._schedules[count].step(*inputs, **outputs, return_outputs=False)
        self._optimizer.step()
        if not has_last:
            return None
        return float(torch.stack(losses).detach().sum())

    def _schedule(self, num_micro_batches: int) -> Any:
        """Build stages and schedule of a number of micro-batches, for which both keep buffers."""
        counted = torch.tensor(float(num_micro_batches * self._settings.micro_batch_size * self._settings.seq_length))

        def loss(logits: Tensor, labels: Tensor) -> Tensor:
            return self._loss(logits, (labels, counted))  # a share of the global token mean: the sum is the mean

        stages = [self._stage(index, module) for index, module in self._modules.items()]
        return self.make_schedule(stages, num_micro_batches, loss)

    def _stage(self, index: int, module: nn.Module) -> PipelineStage:
        """Build a stage, with the shapes that go in and out, so that torch need not run the model to find them."""
        settings = self._settings
        model = settings.run().megastable.model
        shape = (settings.micro_batch_size, settings.seq_length)
        ids = torch.empty(shape, dtype=torch.int64, device="meta")
        hidden = torch.empty(*shape, settings.hidden, dtype=settings.dtype, device="meta", requires_grad=True)
        logits = torch.empty(*shape, model.padded_vocab_size, dtype=settings.dtype, device="meta", requires_grad=True)
        return PipelineStage(
            module, index, self._num_stages, torch.device("cpu"),
            input_args=ids if index == 0 else hidden,
            output_args=logits if index == self._num_stages - 1 else hidden,
        )  # fmt: skip


class OneForwardOneBackward(TorchPipelining):
    """A stage a rank, cut where megastable cuts."""

    def __init__(self, settings: Settings, bounds: list[int]) -> None:
        super().__init__(settings, bounds, [dist.get_rank()])

    def refusal(self, num_micro_batches: int) -> str | None:
        """Refuse less than a micro-batch a stage, where torch's Schedule1F1B raises."""
        if num_micro_batches < NUM_STAGES:
            return f"torch's Schedule1F1B refuses fewer micro-batches than stages ({NUM_STAGES})"
        return None

    def make_schedule(self, stages: list[PipelineStage], num_micro_batches: int, loss: TorchLoss) -> Any:
        """Make the 1F1B schedule over the one stage."""
        return Schedule1F1B(stages[0], num_micro_batches, loss, scale_grads=False)


class ZeroBubbleV(TorchPipelining):
    """Two stages a rank, laid out as a V: the first rank has the first and the last."""

    def __init__(self, settings: Settings) -> None:
        num_stages = 2 * NUM_STAGES
        rank = dist.get_rank()
        layers = RunPlan.of(settings.run(), NUM_STAGES).cut.layers
        bounds = stage_bounds(layers, num_stages, "balanced")
        super().__init__(settings, bounds, [rank, num_stages - 1 - rank], splits_backward=True)

    def refusal(self, num_micro_batches: int) -> str | None:
        """Return None: every number of micro-batches will do."""
        return None

    def make_schedule(self, stages: list[PipelineStage], num_micro_batches: int, loss: TorchLoss) -> Any:
        """Make the zero-bubble V schedule over both stages."""
        return ScheduleZBVZeroBubble(list(stages), num_micro_batches, loss, scale_grads=False)
