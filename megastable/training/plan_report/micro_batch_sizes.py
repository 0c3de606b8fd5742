"""The micro-batch sizes of a run whose file leaves them to be chosen: once, before the run, and recorded in it."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

from megastable.config import RunConfig
from megastable.core.batch_rampup import Batch, global_batch_sizes
from megastable.core.devices import DEVICES
from megastable.core.errors import UserError
from megastable.core.micro_batch_choice import MicroBatchChoice
from megastable.training.plan_report.assumptions import Machine
from megastable.training.plan_report.calibrated import Calibration, load_calibration
from megastable.training.plan_report.memory import stage_memory
from megastable.training.plan_report.timing import step_cost
from megastable.training.run_plan import RunPlan

CALIBRATION_KEY = "megastable.batch_rampup.calibration"
SHOWN_SPLITS = 6
"""config.json has them all."""


def with_chosen_micro_batches(run: RunConfig, world_size: int) -> RunConfig:
    """The run with ``chosen_micro_batch_sizes``; as it is where it gives its sizes itself or they were chosen before.

    They are chosen for the whole ramp, also where the run ends before it does, so that it can be continued with more
    steps. A pure function of its arguments and the calibration: every rank finds the same.

    Raises:
        UserError: the calibration cannot be read, or a batch does not divide or fits no device.
    """
    ramp = run.megastable.batch_rampup
    if not ramp.chooses_micro_batch_sizes or ramp.chosen_micro_batch_sizes:
        return run
    plan = RunPlan.of(run, world_size)  # in micro-batches of one sample
    replicas = plan.layout.data_parallel_size
    calibration = _calibration(plan)

    def needed_bytes(batch: Batch) -> float:
        return max(use.total for use in stage_memory(plan, calibration.on_cpu, [batch]))

    usable_bytes = math.inf if calibration.usable_bytes is None else calibration.usable_bytes
    choice = MicroBatchChoice(replicas, calibration.cost, needed_bytes, usable_bytes)
    # The plan has found that those within the run divide; a later one may be of a ramp that is never run to its end.
    sizes = [size for size in global_batch_sizes(plan.ramp.schedule) if size % replicas == 0]
    return _with_sizes(run, choice.micro_batch_size_steps(sizes))


def with_recorded_micro_batches(run: RunConfig, recorded: dict[str, Any]) -> RunConfig:
    """The run with the sizes that were chosen for the ``recorded`` run file which it continues, if they were.

    Sizes in its own file stand.

    Raises:
        UserError: they do not divide a batch of the run's ramp, which is then another than the recorded one.
    """
    ramp = run.megastable.batch_rampup
    sizes = recorded.get("megastable", {}).get("batch_rampup", {}).get("chosen_micro_batch_sizes", ())
    if not ramp.chooses_micro_batch_sizes or ramp.chosen_micro_batch_sizes or not sizes:
        return run
    chosen = _with_sizes(run, tuple((start, size) for start, size in sizes))
    for size in global_batch_sizes(ramp.schedule()):
        micro_batch_size = chosen.megastable.batch_rampup.ramp(1, 1).micro_batch_size_for(size)
        if size % micro_batch_size:
            raise UserError(
                f"megastable.batch_rampup: the checkpoint's chosen_micro_batch_sizes give global batch {size} "
                f"micro-batches of {micro_batch_size}, which do not divide it: the ramp is another than the "
                'checkpoint\'s. Keep that one, or replace "micro_batch_size": "auto" by micro_batch_size_steps'
            )
    return chosen


def describe_choice(plan: RunPlan) -> str:
    """The run's batches at which the chosen micro-batch size is another than before, and how they are split."""
    batches = [phase.batch for phase in plan.phases]
    changes = [batch for old, batch in pairwise(batches) if batch.micro_batch_size != old.micro_batch_size]
    splits = [
        f"batch {batch.global_batch_size}: {batch.micro_batch_size} x {batch.num_microbatches}"
        for batch in (batches[0], *changes)
    ]
    more = f" and {len(splits) - SHOWN_SPLITS} more changes" if len(splits) > SHOWN_SPLITS else ""
    return (
        f"micro-batch size x micro-batches, chosen by {plan.run.megastable.batch_rampup.calibration}, from "
        f"{', '.join(splits[:SHOWN_SPLITS])}{more}"
    )


def _calibration(plan: RunPlan) -> Calibration:
    """What the file's ``calibration`` names: a device, or else a file.

    Raises:
        UserError: neither is found, or the file cannot be used.
    """
    name = plan.run.megastable.batch_rampup.calibration
    assert name is not None
    if is_data_sheet(name):
        machine = Machine.of(name)
        assert machine is not None
        return Calibration(step_cost(plan, machine), machine.device.usable_bytes, f"the data sheet of {name.upper()}")
    path = Path(name).expanduser()
    if not path.is_file():
        raise UserError(f"{CALIBRATION_KEY} = {name}: is neither a file nor one of {', '.join(DEVICES)}")
    return load_calibration(path, plan)


def is_data_sheet(calibration: str | None) -> bool:
    """Whether it names a device instead of a file."""
    return calibration is not None and calibration.upper() in DEVICES


def _with_sizes(run: RunConfig, sizes: tuple[tuple[int, int], ...]) -> RunConfig:
    own = run.megastable
    ramp = own.batch_rampup.model_copy(update={"chosen_micro_batch_sizes": sizes})
    return run.model_copy(update={"megastable": own.model_copy(update={"batch_rampup": ramp})})
