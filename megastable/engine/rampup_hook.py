"""The hook that applies the batch ramp to the engine before every step."""

from __future__ import annotations

from deepspeed.runtime.pipe.engine import PipelineEngine

from megastable.core.batch_rampup import Batch, BatchRampup


class BatchRampupHook:
    """Recomputes micro-batches (and their size) from the consumed samples and tells the engine when they changed.

    Every rank calls it with the same number, so all schedules change between the same two steps.
    """

    def __init__(self, engine: PipelineEngine, ramp: BatchRampup) -> None:
        self._engine = engine
        self._ramp = ramp

    def before_step(self, consumed_samples: int) -> Batch:
        """The batch of the step that starts at ``consumed_samples``, applied to the engine."""
        batch = self._ramp.at(consumed_samples)
        self.apply(batch)
        return batch

    def apply(self, batch: Batch) -> None:
        """Make ``batch`` that of the next steps, whatever the ramp says."""
        engine = self._engine
        if batch.micro_batch_size != engine.micro_batch_size:
            engine.set_train_micro_batch_size(batch.micro_batch_size)
            # DeepSpeed changes its configuration only; its own field and its receive buffers keep the old shape.
            engine.micro_batch_size = batch.micro_batch_size
            engine.reset_activation_shape()
        if batch.global_batch_size != engine.train_batch_size():
            engine.set_train_batch_size(batch.global_batch_size)
