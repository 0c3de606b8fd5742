"""Faults of DeepSpeed 0.19.8 that a run file can reach, and what is done about each. Every one has a test."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine

from megastable.config import RunConfig
from megastable.core.errors import UserError


def check_fp16_support(run: RunConfig) -> None:
    """Let fp16 run on a CPU without native fp16 where the run file opts in to it.

    The arithmetic works there, only slowly; DeepSpeed refuses it.

    Raises:
        UserError: the run wants fp16, the device has none and the file does not opt in.
    """
    accelerator = get_accelerator()
    if not run.fp16.enabled or accelerator.is_fp16_supported():
        return
    if not run.megastable.training.fp16_on_cpu:
        raise UserError(
            f"fp16.enabled: this {accelerator.device_name()} has no native fp16; use bf16, or set "
            "megastable.training.fp16_on_cpu=true to try fp16 with slow arithmetic"
        )
    accelerator.is_fp16_supported = lambda: True


def skip_at_minimum_scale(optimizer: Any) -> None:
    """Let a step that overflows at the minimum loss scale be skipped like any other.

    DeepSpeed raises there, out of the middle of a step; megastable's monitors count such steps and stop the run with a
    diagnosis.
    """
    if getattr(optimizer, "loss_scaler", None) is not None:
        optimizer.loss_scaler.raise_error_at_min_scale = False


def reduce_tied_gradients_where_they_are(engine: PipelineEngine) -> None:
    """Sum the gradients of tied copies wherever this precision accumulates them.

    With fp16 and fp32 accumulation ZeRO keeps them in ``grad_accum``; DeepSpeed reduces ``grad``, which is empty there,
    so the copies of a tied weight drift apart.
    """

    def exec_reduce_tied_grads(self: PipelineEngine) -> None:
        for weight, group in self.module.get_tied_weights_and_groups():
            gradient = accumulated_gradient(weight)
            if gradient is not None:
                torch.distributed.all_reduce(gradient, group=group)

    engine._INSTRUCTION_MAP = {**engine._INSTRUCTION_MAP, schedule.ReduceTiedGrads: exec_reduce_tied_grads}


def accumulated_gradient(parameter: torch.nn.Parameter) -> torch.Tensor | None:
    """The gradient summed over micro-batches so far: fp32 copies first, then the parameter's own."""
    for name in ("_hp_grad", "grad_accum", "grad"):
        gradient: torch.Tensor | None = getattr(parameter, name, None)
        if gradient is not None:
            return gradient
    return None


class ConfiguredOptimizer:
    """What the run file says of the optimizer, to be put back after a load.

    Loading a checkpoint replaces the clip norm, the loss scaler with all its settings, and the hyperparameters of the
    parameter groups by those that were saved. Only the scaler's position (its scale and counters) belongs to the
    checkpoint.
    """

    SCALER_POSITION = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._clip_grad = optimizer.clip_grad
        self._scaler = getattr(optimizer, "loss_scaler", None)
        self._groups = [
            {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
        ]

    def put_back(self) -> None:
        """Restore the configured settings, keeping the loaded scaler's position where both scale dynamically."""
        self._optimizer.clip_grad = self._clip_grad
        for group, configured in zip(self._optimizer.param_groups, self._groups, strict=True):
            group.update(configured)
        if self._scaler is None:
            return
        loaded = self._optimizer.loss_scaler
        if self._scaler.dynamic and loaded.dynamic:
            for name in self.SCALER_POSITION:
                setattr(self._scaler, name, getattr(loaded, name))
        self._optimizer.loss_scaler = self._scaler
        self._optimizer.dynamic_loss_scale = self._scaler.dynamic
