"""megastable's own engine, stepped as its training loop does."""

from __future__ import annotations

import tempfile
from pathlib import Path

from gpt import NUM_STAGES, GlobalBatch, Settings

from megastable.engine.pipeline_module import GptPipeline
from megastable.engine.rampup_hook import BatchRampupHook
from megastable.engine.training_engine import TrainingEngine
from megastable.planning.run_plan import RunPlan


def own_bounds(settings: Settings) -> list[int]:
    """Return the bounds of the stages into which megastable cuts this model by itself; collective."""
    run = settings.run()
    return [int(bound) for bound in GptPipeline(run, RunPlan.of(run, NUM_STAGES).layout).parts]


class Megastable:
    """The engine of a run with these settings. A batch size is applied by the ramp's own hook, one ramp a size."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        plan = RunPlan.of(settings.run(), NUM_STAGES)
        self._engine = TrainingEngine(plan.run, plan.layout, plan.ramp, Path(tempfile.gettempdir()))
        self._hooks: dict[int, BatchRampupHook] = {}

    def refusal(self, num_micro_batches: int) -> str | None:
        """Return None: every number of micro-batches will do."""
        return None

    def step(self, batch: GlobalBatch) -> float:
        """Take one optimizer step; returns the loss on every rank."""
        count = batch.num_micro_batches
        if count not in self._hooks:
            ramp = RunPlan.of(self._settings.run(count), NUM_STAGES).ramp
            self._hooks[count] = BatchRampupHook(self._engine.deepspeed, ramp)
        self._hooks[count].before_step(0)
        micro_batches = batch.micro_batches() if self._engine.needs_data else None
        return self._engine.train_batch(micro_batches, self._settings.learning_rate).loss
