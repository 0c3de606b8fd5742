"""Builds DeepSpeed's pipeline engine for one rank of a run, and runs the ramp, the steps and the evaluations on it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import deepspeed
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe.engine import TRAIN_BATCH_TIMER

from megastable.config import RunConfig
from megastable.core.batch_rampup import Batch, BatchRampup
from megastable.core.layout import ParallelLayout
from megastable.core.memory import reduce_bucket_elements
from megastable.core.records import Candidate, Culprit, StepResult
from megastable.data import MicroBatch
from megastable.engine.checkpoint_tensors import MASTER
from megastable.engine.consistency import ConsistencyCheck
from megastable.engine.deepspeed_config import deepspeed_config
from megastable.engine.flat_partitions import flat_partitions
from megastable.engine.instructions import (
    BusyTime,
    forward_pass,
    has_several_replicas,
    install_instructions,
    instruction_table,
    marking_progress,
)
from megastable.engine.layer_statistics import WeightKind, movement_since, weight_kinds
from megastable.engine.layer_watch import LayerWatch
from megastable.engine.model_state import ModelState, Snapshot
from megastable.engine.optimizer import build_optimizer, skip_at_minimum_scale
from megastable.engine.packing import PackedDocuments, recompute_with_documents
from megastable.engine.pipeline_module import GptPipeline, compile_blocks, mark_compilation, uncompiled
from megastable.engine.progress import Progress
from megastable.engine.rampup_hook import BatchRampupHook
from megastable.engine.random_state import seed_rank
from megastable.engine.replay import Replay
from megastable.engine.sample_losses import gathered_losses, one_by_one
from megastable.engine.tensor_group import partial_parameters
from megastable.engine.weight_update import WeightUpdate


class TrainingEngine:
    """The engine of one rank; its methods are collective, every rank of the run calls them together.

    Args:
        first_sample: samples consumed before the first step.
        asked_to_stop: tells whether this rank has been asked to stop, which a step tells all ranks.
        end_of_document: the token at which attention and positions begin anew; None where a sample is read as one text.

    Attributes:
        deepspeed: DeepSpeed's own engine.
        model_state: what training changes of the model on this rank.
        rampup_hook: sets the batch of a step.
        writers: DeepSpeed's TensorBoard, W&B, Comet and CSV writers, which write only what they are called with.
        layout: the stages, replicas and tensor ranks of the run.
        stage: the pipeline stage of this rank.
        replica: its index among the data-parallel ranks.
        progress: marked at every instruction.
    """

    def __init__(
        self,
        run: RunConfig,
        layout: ParallelLayout,
        ramp: BatchRampup,
        run_dir: Path,
        first_sample: int = 0,
        asked_to_stop: Callable[[], bool] = lambda: False,
        progress: Progress | None = None,
        end_of_document: int | None = None,
    ) -> None:
        self._run = run
        self.layout = layout
        self.progress = progress or Progress()
        module = GptPipeline(run, layout)
        engine, optimizer, _, _ = deepspeed.initialize(
            model=module,
            optimizer=build_optimizer(module, run),
            # The batch of sample 0 may be one that this layout does not divide, where a run goes on after it.
            config=deepspeed_config(run, ramp.at(first_sample), run_dir, _bucket_size(module, run, layout)),
            dist_init_required=False,
        )
        self.deepspeed = engine
        self.stage: int = engine.grid.get_stage_id()
        self.replica: int = engine.grid.get_data_parallel_id()
        tensor_rank: int = engine.grid.get_tensor_model_parallel_rank()

        # What a step executes.
        partitions = flat_partitions(optimizer, module, tensor_rank)
        tensor = run.megastable.tensor_parallel
        partial = partial_parameters(module, tensor.size, tensor.sequence_parallel)
        busy = BusyTime()
        self._documents: PackedDocuments | None = None
        forward = forward_pass
        if end_of_document is not None:
            self._documents = PackedDocuments(module, end_of_document)
            forward = self._documents.read_in(forward_pass)
            recompute_with_documents(module)
        install_instructions(engine, marking_progress(instruction_table(partial, busy, forward), self.progress))
        self._update = WeightUpdate(
            optimizer,
            partitions,
            reduced=has_several_replicas(engine),
            loss=lambda: engine.total_loss,
            asked_to_stop=asked_to_stop,
        )
        self._update.replace_step()
        self._replay = Replay(engine, layout, self._update.discard_gradients, run.megastable.model.vocab_size)
        skip_at_minimum_scale(optimizer)
        if run.megastable.model.compile:
            compile_blocks(module, run)
            mark_compilation(self.progress)

        # What is measured and written.
        self._watch = LayerWatch(engine, partitions, busy, run)
        self._watch.attach_hooks()
        self._consistency = ConsistencyCheck(engine, partitions, layout)
        # DeepSpeed writes some values of its own, under other names and at every evaluated batch; we write them all.
        self.writers = engine.monitor
        engine.monitor = SilentMonitor()

        # What changes during a run.
        self.model_state = ModelState(optimizer, partitions)
        self.model_state.make_moments()
        self.rampup_hook = BatchRampupHook(engine, ramp)
        seed_rank(run.megastable.training.seed, self.stage, self.replica, tensor_rank)

    @property
    def needs_data(self) -> bool:
        """Tell whether this rank reads micro-batches.

        The first stage needs the tokens, the last one the labels, and every stage the documents where packing resets.
        """
        return bool(self._documents or self.deepspeed.is_first_stage() or self.deepspeed.is_last_stage())

    def train_batch(
        self,
        micro_batches: Iterator[MicroBatch] | None,
        learning_rate: float,
        watch: bool = False,
        veto: Callable[[Candidate], bool] = lambda candidate: False,
        asks_to_save: bool = False,
    ) -> StepResult:
        """Run one optimizer step on the batch that the ramp-up hook applied.

        Args:
            micro_batches: exactly ``num_microbatches`` items on ranks that need data, None elsewhere.
            learning_rate: the learning rate of this step.
            watch: measure every layer and rank during the step, see ``StepResult.watched``.
            veto: asked before the update where loss and gradients are finite; True skips it, as if the step had not
                been. It has to answer the same on every rank.
            asks_to_save: whether this rank asks all for a save, see ``StepResult.asked_to_save``.
        """
        engine = self.deepspeed
        self._update.asks_to_save = asks_to_save
        self._update.veto = lambda losses, norm: veto(self._candidate(losses, norm))
        for group in engine.optimizer.param_groups:
            group["lr"] = learning_rate
        # Read before the step, which may change it: this is the scale of the step's own gradients.
        loss_scale = float(engine.optimizer.loss_scale) if self._run.fp16.enabled else 1.0
        if watch:
            self._watch.begin()
        self._replay.begin_step()
        get_accelerator().synchronize()
        started = time.perf_counter()
        with self._hookable() if watch else contextlib.nullcontext():
            loss = engine.train_batch(self._followed(micro_batches))
        get_accelerator().synchronize()
        step_seconds = time.perf_counter() - started
        # DeepSpeed clears it where it prints, and it is never asked to; the record would grow with every step.
        engine.timers(TRAIN_BATCH_TIMER).reset()
        return StepResult(
            loss=float(loss),
            grad_norm=float(engine.get_global_grad_norm()),
            loss_scale=loss_scale,
            skipped=not engine.was_step_applied(),
            step_seconds=step_seconds,
            watched=self._watch.finish(step_seconds) if watch else None,
            asked_to_stop=self._update.asked_to_stop,
            vetoed=self._update.vetoed,
            asked_to_save=self._update.asked_to_save,
        )

    def _candidate(self, losses: float, grad_norm: float) -> Candidate:
        # Every replica's losses are in the sum, once for each of its tensor ranks.
        copies = self.layout.data_parallel_size * self.layout.tensor_parallel_size
        loss = losses / (self.deepspeed.gradient_accumulation_steps() * copies)
        return Candidate(loss, grad_norm, self.deepspeed.train_batch_size())

    def skip_batch(self, asked_to_stop: bool, step_seconds: float) -> StepResult:
        """Leave everything as it is where a batch has nothing to learn from, and return what a step returns.

        Args:
            asked_to_stop: whether a rank has been asked to stop, which a step tells by itself.
            step_seconds: what it took to find that out.
        """
        loss_scale = float(self.deepspeed.optimizer.loss_scale) if self._run.fp16.enabled else 1.0
        return StepResult(
            loss=0.0,
            grad_norm=0.0,
            loss_scale=loss_scale,
            skipped=True,
            step_seconds=step_seconds,
            asked_to_stop=asked_to_stop,
            has_labels=False,
        )

    def find_culprit(
        self, micro_batches: Iterator[MicroBatch] | None, loss_scale: float
    ) -> tuple[Culprit | None, list[str]]:
        """Compute the passes of the last step again, whose update was not applied, and look at every value.

        Training goes on as if it had not been called.

        Args:
            micro_batches: those of the step, as ``train_batch`` takes them.
            loss_scale: that of the step, which may have changed it.

        Returns:
            The first value that is not finite, None where all are; and the names of the weights whose gradient was
            not finite at the step itself. Both are the same on every rank.
        """
        with self.model_state.at_loss_scale(loss_scale), self._hookable():
            culprit = self._replay.find(self._followed(micro_batches))
        return culprit, self._replay.gathered(self._update.not_finite)

    def sample_losses(self, micro_batches: Iterator[MicroBatch] | None, batch: Batch) -> list[float]:
        """Return the loss of every sample of a global batch, in its order, without dropout; the same on every rank.

        Training goes on as if it had not been called.

        Args:
            micro_batches: of this rank, as ``train_batch`` takes them.
            batch: how they make up the global batch.
        """
        replicas = self.layout.data_parallel_size
        self.rampup_hook.apply(Batch(batch.global_batch_size, 1, batch.global_batch_size // replicas))
        samples = None if micro_batches is None else one_by_one(micro_batches)
        with self._hookable():
            self.evaluate(samples, batch.global_batch_size // replicas)
        losses = gathered_losses(self.deepspeed, batch)
        self.rampup_hook.apply(batch)
        return losses

    def _hookable(self) -> contextlib.AbstractContextManager[object]:
        """Return a context in which hooks inside of blocks are called, also where the blocks are compiled."""
        return uncompiled() if self._run.megastable.model.compile else contextlib.nullcontext()

    def snapshot(self, reused: Snapshot | None = None) -> Snapshot:
        """Copy all that training changes to host memory, between two steps.

        Args:
            reused: a snapshot that is not needed any more, whose memory is used again.
        """
        return self.model_state.snapshot(reused)

    def restore(self, snapshot: Snapshot) -> None:
        """Go back, to the bit, to the step that ``snapshot`` was taken after; between two steps.

        The counts of the loop, such as consumed samples, are not the engine's: they go back with the loop's own record.
        """
        self.model_state.restore(snapshot)

    def movement_since(self, snapshot: Snapshot) -> dict[str, float]:
        """Return how far every layer's weights have moved since ``snapshot``, as a share of their norm; collective."""
        module = self.deepspeed.module
        before = [flats[MASTER] for flats in snapshot.flats]
        shares = movement_since(module, self.model_state.partitions, before, len(module.layer_names))
        return dict(zip(module.layer_names, shares, strict=True))

    def weight_kinds(self) -> list[WeightKind]:
        """Measure the std of every kind of weight as it is now, beside the formula that fresh ones are drawn by."""
        return weight_kinds(self.deepspeed.module, self._run)

    def check_consistency(self) -> tuple[list[str], float]:
        """Compare what should be equal on several ranks; return what differs and the seconds that it took."""
        started = time.perf_counter()
        differences = self._consistency.differences()
        return differences, time.perf_counter() - started

    def evaluate(self, micro_batches: Iterator[MicroBatch] | None, num_micro_batches: int) -> float:
        """Return the token mean of the loss over the micro-batches of all replicas, without dropout.

        Training goes on as if it had not been called.

        Args:
            micro_batches: ``num_micro_batches`` items of the current micro-batch size on ranks that need data.
        """
        return float(self.deepspeed.eval_batch(self._followed(micro_batches), num_micro_batches=num_micro_batches))

    def _followed(self, micro_batches: Iterator[MicroBatch] | None) -> Iterator[MicroBatch] | None:
        if self._documents is None or micro_batches is None:
            return micro_batches
        return self._documents.following(micro_batches)


def _bucket_size(module: GptPipeline, run: RunConfig, layout: ParallelLayout) -> int:
    """Return the size, in elements, of the buffer in which ZeRO gathers gradients to reduce them."""
    # One replica does not reduce, see ``instructions.reduce_gradients``.
    if layout.data_parallel_size == 1:
        return 1
    num_parameters = sum(parameter.numel() for parameter in module.parameters())
    return reduce_bucket_elements(run.zero_optimization.reduce_bucket_size, num_parameters)


class SilentMonitor:
    """Replaces the monitor inside DeepSpeed's engine, which writes to it only where it is enabled."""

    enabled = False
