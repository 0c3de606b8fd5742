"""The hook by which the ramp sets the batch of every step on DeepSpeed's pipeline engine."""

from __future__ import annotations

from deepspeed.runtime.pipe.engine import PipelineEngine

from megastable.core.batch_rampup import Batch, BatchRampup


class BatchRampupHook:
    """Applies the batch of a step, which the ramp computes from the consumed samples, to the engine when it changed.

    Every rank calls it with the same number, so the schedules of all stages change between the same two steps.
    """

    def __init__(self, engine: PipelineEngine, ramp: BatchRampup) -> None:
        self._engine = engine
        self._ramp = ramp

    def before_step(self, consumed_samples: int) -> Batch:
        """Return the batch of the step that starts at ``consumed_samples``, applied to the engine."""
        batch = self._ramp.at(consumed_samples)
        self.apply(batch)
        return batch

    def apply(self, batch: Batch) -> None:
        """Make ``batch`` that of the next steps, whatever the ramp says."""
        engine = self._engine
        if batch.micro_batch_size != engine.train_micro_batch_size_per_gpu():
            engine.set_train_micro_batch_size(batch.micro_batch_size)
            # DeepSpeed changes its configuration only; the buffers that it receives into keep the old shape.
            engine.reset_activation_shape()
        # After the micro-batch size, by which DeepSpeed divides to count the micro-batches.
        if batch.global_batch_size != engine.train_batch_size():
            engine.set_train_batch_size(batch.global_batch_size)
