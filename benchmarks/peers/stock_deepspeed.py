"""DeepSpeed's own pipeline engine with its defaults, and the same loop."""

from __future__ import annotations

import contextlib
import os

import deepspeed
from deepspeed.pipe import PipelineModule
from gpt import NUM_STAGES, GlobalBatch, Settings, loss_function

from megastable.engine.optimizer import build_optimizer
from megastable.engine.pipeline_module import DrawnLayerSpec
from megastable.model.layers import gpt_layers
from megastable.model.tensor_parallel import OneProcess


class StockDeepSpeed:
    """``PipelineModule`` cut by its default method, ZeRO stage 1 with its default buckets.

    Args:
        fused: give it torch's fused AdamW; without, AdamW as torch makes it by default.
    """

    def __init__(self, settings: Settings, fused: bool) -> None:
        run = settings.run(fused=fused)
        with open(os.devnull, "w") as devnull, contextlib.redirect_stdout(devnull):  # it prints its own tables
            module = PipelineModule(
                [DrawnLayerSpec(layer, run) for layer in gpt_layers(run, OneProcess())],
                num_stages=NUM_STAGES,
                loss_fn=loss_function(),
            )
        self.bounds = [int(bound) for bound in module.parts]
        self._engine, *_ = deepspeed.initialize(
            model=module,
            optimizer=build_optimizer(module, run),
            config={
                "train_batch_size": settings.micro_batch_size,
                "train_micro_batch_size_per_gpu": settings.micro_batch_size,
                "gradient_clipping": run.clip_norm,
                "zero_optimization": {"stage": 1},
                "bf16": {"enabled": run.bf16.enabled},
            },
            dist_init_required=False,
        )

    def refusal(self, num_micro_batches: int) -> str | None:
        """Return None: every number of micro-batches will do."""
        return None

    def step(self, batch: GlobalBatch) -> float:
        """Take one optimizer step; returns the loss on every rank."""
        if self._engine.train_batch_size() != len(batch.ids):
            self._engine.set_train_batch_size(len(batch.ids))
        return float(self._engine.train_batch(batch.micro_batches()))
