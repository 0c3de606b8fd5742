"""Ten clean runs of 300 steps, of different seeds, ramps, precisions and layouts: nobody may raise an alarm."""

from __future__ import annotations

from dataclasses import dataclass

from gauntlet.base import BF16, FP16, Changes

CLEAN_STEPS = 300
STEPS: Changes = {
    "megastable.training.total_steps": CLEAN_STEPS,
    "megastable.training.eval_interval": CLEAN_STEPS,
    "megastable.lr_schedule.warmup": 200,
}
FP32_SUMS: Changes = {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}
LINEAR: Changes = {
    "megastable.batch_rampup": {"start": 8, "increment": 4, "final": 16, "samples_per_increment": 800},
    "megastable.lr_schedule.warmup": 320,
}
LISTED: Changes = {
    "megastable.batch_rampup": {"steps": [[0, 8], [800, 16]]},
    "megastable.lr_schedule.warmup": 320,
}
REPLICAS: Changes = {"train_micro_batch_size_per_gpu": 1}
ONE_STAGE: Changes = {"megastable.pipeline.num_stages": 1}


@dataclass(frozen=True)
class CleanRun:
    """A run without a fault."""

    name: str
    world_size: int
    seed: int
    changes: Changes

    @property
    def all_changes(self) -> Changes:
        """Return what is changed in the base run."""
        return {**STEPS, **self.changes, "megastable.training.seed": self.seed}


CLEAN_RUNS = (
    CleanRun("fp32, 2 stages", 2, 11, {}),
    CleanRun("fp32, 2 stages, linear ramp", 2, 12, LINEAR),
    CleanRun("fp32, 1 stage, 2 replicas", 2, 13, {**ONE_STAGE, **REPLICAS}),
    CleanRun("fp32, 2 stages, 2 replicas", 4, 14, REPLICAS),
    CleanRun("bf16, 2 stages", 2, 15, BF16),
    CleanRun("bf16, 1 stage, listed ramp", 1, 16, {**BF16, **ONE_STAGE, **LISTED}),
    CleanRun("bf16 with fp32 sums, 2 stages, linear ramp", 2, 17, {**FP32_SUMS, **LINEAR}),
    CleanRun("bf16 with fp32 sums, 1 stage, 2 replicas", 2, 18, {**FP32_SUMS, **ONE_STAGE, **REPLICAS}),
    CleanRun("fp16, 2 stages", 2, 19, FP16),
    CleanRun("fp16, 1 stage, linear ramp", 1, 20, {**FP16, **ONE_STAGE, **LINEAR}),
)
