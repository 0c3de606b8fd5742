"""One rank's engine: builds DeepSpeed's pipeline engine for a run, and runs steps and evaluations on it."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from pathlib import Path

import deepspeed
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe.engine import TRAIN_BATCH_TIMER
from deepspeed.utils import logger as deepspeed_logger

from megastable.config import RunConfig
from megastable.core.batch_rampup import BatchRampup
from megastable.core.layout import ParallelLayout
from megastable.core.memory import reduce_bucket_elements
from megastable.core.records import StepResult
from megastable.data import MicroBatch
from megastable.engine import tensor_gradients, upstream_fixes
from megastable.engine.compiled_blocks import compile_blocks, uncompiled
from megastable.engine.consistency import ConsistencyCheck
from megastable.engine.deepspeed_config import deepspeed_config
from megastable.engine.flat_partitions import flat_partitions
from megastable.engine.layer_watch import LayerWatch
from megastable.engine.optimizer import build_optimizer
from megastable.engine.pipeline_instructions import move_activations_once
from megastable.engine.pipeline_module import GptPipeline
from megastable.engine.rampup_hook import BatchRampupHook
from megastable.engine.random_state import seed_rank
from megastable.engine.tensor_group import partial_parameters
from megastable.engine.weight_report import WeightKind, weight_kinds
from megastable.engine.weight_update import WeightUpdate


class TrainingEngine:
    """The engine of one rank; its methods are collective, every rank of the run calls them together.

    Attributes:
        deepspeed: DeepSpeed's own engine.
        writers: DeepSpeed's TensorBoard, W&B, Comet and CSV writers, silent unless told to write.
        stage, replica: where this rank stands.
    """

    def __init__(self, run: RunConfig, layout: ParallelLayout, ramp: BatchRampup, run_dir: Path) -> None:
        deepspeed_logger.setLevel(logging.WARNING)
        module = GptPipeline(run, layout)
        engine, optimizer, _, _ = deepspeed.initialize(
            model=module,
            optimizer=build_optimizer(module, run),
            config=deepspeed_config(run, ramp.at(0), run_dir, _bucket_size(module, run, layout)),
            dist_init_required=False,
        )
        partitions = flat_partitions(optimizer, engine.grid.get_tensor_model_parallel_rank())
        WeightUpdate(engine, optimizer, partitions)
        move_activations_once(engine)
        upstream_fixes.skip_at_minimum_scale(optimizer)
        upstream_fixes.reduce_tied_gradients_where_they_are(engine)
        if layout.tensor_parallel_size > 1:
            partial = partial_parameters(module, run.megastable.tensor_parallel.sequence_parallel)
            tensor_gradients.sum_partial_gradients(engine, partial)
        if run.megastable.model.compile:
            compile_blocks(module, run)
        self.deepspeed = engine
        self.configured_optimizer = upstream_fixes.ConfiguredOptimizer(optimizer)
        self.rampup_hook = BatchRampupHook(engine, ramp)
        # DeepSpeed writes some values of its own, under other names and at every evaluated batch; we write them all.
        self.writers, engine.monitor = engine.monitor, SilentMonitor()
        self.stage: int = engine.grid.get_stage_id()
        self.replica: int = engine.grid.get_data_parallel_id()
        self._scaled, self._compiled = run.fp16.enabled, run.megastable.model.compile
        self._watch = LayerWatch(engine, optimizer, partitions, module, run)
        self._consistency = ConsistencyCheck(engine, partitions, layout)
        self._run = run
        seed_rank(run.megastable.training.seed, self.stage, self.replica, engine.grid.get_tensor_model_parallel_rank())

    @property
    def needs_data(self) -> bool:
        """True on the ranks that read micro-batches: those of the first and the last stage."""
        return bool(self.deepspeed.is_first_stage() or self.deepspeed.is_last_stage())

    def train_batch(
        self, micro_batches: Iterator[MicroBatch] | None, learning_rate: float, watch: bool = False
    ) -> StepResult:
        """One optimizer step on the batch that the ramp-up hook applied.

        Args:
            micro_batches: exactly ``num_microbatches`` items on ranks that need data, None elsewhere.
            learning_rate: of this step.
            watch: look at every layer and rank during the step, see ``StepResult.watched``.
        """
        engine = self.deepspeed
        for group in engine.optimizer.param_groups:
            group["lr"] = learning_rate
        loss_scale = float(engine.optimizer.loss_scale) if self._scaled else 1.0
        if watch:
            self._watch.begin()
        get_accelerator().synchronize()
        started = time.perf_counter()
        with uncompiled() if watch and self._compiled else contextlib.nullcontext():
            loss = engine.train_batch(micro_batches)
        get_accelerator().synchronize()
        step_seconds = time.perf_counter() - started
        engine.timers(TRAIN_BATCH_TIMER).reset()  # it keeps every step's record otherwise
        return StepResult(
            loss=float(loss),
            grad_norm=float(engine.get_global_grad_norm()),
            loss_scale=loss_scale,
            skipped=not engine.was_step_applied(),
            step_seconds=step_seconds,
            watched=self._watch.finish(step_seconds) if watch else None,
        )

    def weight_kinds(self) -> list[WeightKind]:
        """The std of every kind of weight as it is now, beside the formula that fresh ones are drawn by."""
        return weight_kinds(self.deepspeed.module, self._run)

    def check_consistency(self) -> tuple[list[str], float]:
        """Compare what should be equal on several ranks: what differs, see ``ConsistencyCheck``, and the seconds."""
        started = time.perf_counter()
        return self._consistency.differences(), time.perf_counter() - started

    def evaluate(self, micro_batches: Iterator[MicroBatch] | None, num_micro_batches: int) -> float:
        """Token mean of the loss over the micro-batches of all replicas, without dropout; training is left as it was.

        Args:
            micro_batches: ``num_micro_batches`` items of the current micro-batch size on ranks that need data.
        """
        return float(self.deepspeed.eval_batch(micro_batches, num_micro_batches=num_micro_batches))


def _bucket_size(module: GptPipeline, run: RunConfig, layout: ParallelLayout) -> int:
    """Elements of ZeRO's gradient buffer; one replica does not reduce, but DeepSpeed allocates it all the same."""
    if layout.data_parallel_size == 1:
        return 1
    num_parameters = sum(parameter.numel() for parameter in module.parameters())
    return reduce_bucket_elements(run.zero_optimization.reduce_bucket_size, num_parameters)


class SilentMonitor:
    """Takes the place of DeepSpeed's monitor inside its engine, which asks only whether it is enabled."""

    enabled = False
