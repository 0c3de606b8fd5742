"""From a run file to its plan, on as many devices as were asked for."""

from __future__ import annotations

from pathlib import Path

from megastable.config import RunConfig, load_run_file
from megastable.training.plan_report.micro_batch_sizes import with_chosen_micro_batches
from megastable.training.run_plan import RunPlan


def load_plan(path: Path, num_devices: int | None, choose: bool = True) -> tuple[RunPlan, bool]:
    """The plan of a run file, and whether the number of devices was only assumed.

    Args:
        num_devices: None for as many as the file asks for, else the fewest that hold its stages and tensor ranks.

        choose: make the choice of micro-batch sizes, where the file leaves it open; without it they are of one sample.

    Raises:
        UserError: the file cannot be read, holds faults or does not fit the devices; or its micro-batch sizes are to be
            chosen, and cannot be.
    """
    run, devices = load_run(path, num_devices)
    assumed = num_devices is None and run.megastable.training.world_size is None
    run = load_run_file(path, world_size=devices)  # now also checked on its layout
    return RunPlan.of(with_chosen_micro_batches(run, devices) if choose else run, devices), assumed


def load_run(path: Path, num_devices: int | None) -> tuple[RunConfig, int]:
    """A run file, which need not fit the devices, and their number; arguments and errors as ``load_plan``."""
    run = load_run_file(path)
    return run, num_devices or run.megastable.training.world_size or fewest_devices(run)


def fewest_devices(run: RunConfig) -> int:
    """One replica: all stages, with all their tensor ranks."""
    return run.megastable.pipeline.num_stages * run.megastable.tensor_parallel.size
