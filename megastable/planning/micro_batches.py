"""The choice of micro-batch sizes where a run file leaves it to the program: once, before the run, and recorded in it.

``MicroBatchChoice`` finds the split of a batch that a cost makes fastest within the memory.
``with_chosen_micro_batches`` applies it to a run of a given number of devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from megastable.config import RunConfig, load_run_file
from megastable.core.batch_rampup import Batch, global_batch_sizes
from megastable.core.devices import DEVICES
from megastable.core.errors import UserError
from megastable.core.layout import divisors
from megastable.core.memory import GIB
from megastable.core.pipeline_cost import PipelineCost
from megastable.core.records import FRESH, TrainingState
from megastable.core.user_paths import expanded
from megastable.planning.calibration import Calibration, load_calibration
from megastable.planning.data_sheet_cost import Machine, step_cost
from megastable.planning.memory import fullest_stage
from megastable.planning.run_plan import RunPlan, number_of_devices

CALIBRATION_KEY = "megastable.batch_rampup.calibration"
ROUNDING = 1e-9
"""Relative; far above what sums of a step's passes are rounded by, and far below what makes one split faster."""
SHOWN_SPLITS = 6
"""Splits that are shown to people; config.json has them all."""


@dataclass(frozen=True)
class MicroBatchChoice:
    """What the choice goes by.

    Attributes:
        cost: of a step, on the layout of the run.
        needed_bytes: of a step's batch, on the device that needs most.
        usable_bytes: of a device; infinite where it is not known.
    """

    data_parallel_size: int
    cost: PipelineCost
    needed_bytes: Callable[[Batch], float]
    usable_bytes: float

    def batch_of(self, global_batch_size: int) -> Batch:
        """Choose the fastest split that fits; of equally fast ones that with the smaller micro-batch.

        Args:
            global_batch_size: a multiple of the data-parallel size.

        Raises:
            UserError: no split fits.
        """
        splits = self._splits(global_batch_size)
        least_seconds = {batch: self._least_seconds(batch) for batch in splits}
        fitting: dict[Batch, float] = {}
        # Once the bound of a split is above what another takes, so are those of all that follow: they need no playing.
        for batch in sorted(splits, key=lambda split: least_seconds[split]):
            if fitting and least_seconds[batch] > min(fitting.values()):
                break
            if self.needed_bytes(batch) <= self.usable_bytes:
                fitting[batch] = self.cost.step_seconds(batch.micro_batch_size, batch.num_microbatches)
        if fitting:
            # Of equally fast ones the smallest micro-batch needs least memory.
            return min(fitting, key=lambda batch: (fitting[batch], batch.micro_batch_size))
        needs = [self.needed_bytes(batch) for batch in splits]
        least = min(needs)
        raise UserError(
            f"no split of global batch {global_batch_size} over {self.data_parallel_size} replicas fits: "
            f"micro-batches of {splits[needs.index(least)].micro_batch_size} need least, {least / GIB:.2f} GiB a "
            f"device, and {self.usable_bytes / GIB:.2f} are usable"
        )

    def micro_batch_size_steps(self, global_batch_sizes: Iterable[int]) -> tuple[tuple[int, int], ...]:
        """Choose the size for every batch, and return the changes as ``BatchRampup`` reads them.

        Args:
            global_batch_sizes: rising, each a multiple of the data-parallel size.

        Returns:
            (from_global_batch_size, micro_batch_size) of the first batch, and of each whose size differs from the one
            before.

        Raises:
            UserError: as ``batch_of``.
        """
        steps: list[tuple[int, int]] = []
        for global_batch_size in global_batch_sizes:
            size = self.batch_of(global_batch_size).micro_batch_size
            if not steps or steps[-1][1] != size:
                steps.append((global_batch_size, size))
        return tuple(steps)

    def _splits(self, global_batch_size: int) -> list[Batch]:
        samples = global_batch_size // self.data_parallel_size
        return [Batch(global_batch_size, size, samples // size) for size in divisors(samples)]

    def _least_seconds(self, batch: Batch) -> float:
        # Rounding may bring a step below its bound.
        return self.cost.least_step_seconds(batch.micro_batch_size, batch.num_microbatches) * (1 - ROUNDING)


def load_plan(
    path: Path, num_devices: int | None, choose: bool = True, overrides: Sequence[str] = ()
) -> tuple[RunPlan, bool]:
    """Read a run file and plan it; return the plan, and whether the number of devices was only assumed.

    Args:
        num_devices: None as in ``number_of_devices``.
        choose: make the choice of micro-batch sizes, where the file leaves it open; without it they are of one sample.
        overrides: of keys of the file, see ``load_run_file``.

    Raises:
        UserError: the file cannot be read, holds faults or does not fit the devices; or its micro-batch sizes are to be
            chosen, and cannot be.
    """
    devices, assumed = number_of_devices(load_run_file(path, overrides), num_devices)
    # Read again: only a number of devices lets the rules of the layout be checked, and only the file gives the number.
    run = load_run_file(path, overrides, devices)
    if choose:
        run = with_chosen_micro_batches(run, devices)
    return RunPlan.of(run, devices), assumed


def with_chosen_micro_batches(run: RunConfig, world_size: int, state: TrainingState = FRESH) -> RunConfig:
    """Return the run with ``chosen_micro_batch_sizes``; as it is where it gives its sizes, or they were chosen before.

    They are chosen for the whole ramp, also where the run ends before it does, so that it can be continued with more
    steps. A pure function of its arguments and the calibration: every rank finds the same.

    Args:
        state: how far the run is that it continues; a step of it is left.

    Raises:
        UserError: the calibration cannot be read, or a batch does not divide or fits no device.
    """
    ramp = run.megastable.batch_rampup
    if not ramp.chooses_micro_batch_sizes or ramp.chosen_micro_batch_sizes:
        return run
    # Until they are chosen, a plan has micro-batches of one sample, which divide every batch.
    plan = RunPlan.of(run, world_size, state)
    replicas = plan.layout.data_parallel_size
    calibration = _calibration(plan)

    def needed_bytes(batch: Batch) -> float:
        return fullest_stage(plan, calibration.on_cpu, batch)[1]

    # Where the memory is not known, no split can be refused for it.
    usable_bytes = math.inf if calibration.usable_bytes is None else calibration.usable_bytes
    choice = MicroBatchChoice(replicas, calibration.cost, needed_bytes, usable_bytes)
    # The plan has found that all batches within the run divide; a later one may be of a ramp that never runs to its
    # end.
    sizes = [size for size in global_batch_sizes(plan.ramp.schedule) if size % replicas == 0]
    return _with_sizes(run, choice.micro_batch_size_steps(sizes))


def with_recorded_micro_batches(run: RunConfig, recorded: dict[str, Any], first_sample: int) -> RunConfig:
    """Return the run with the sizes that were chosen for the ``recorded`` run file which it continues, if they were.

    They hold on the layout that they were chosen for. Sizes in its own file stand.

    Args:
        first_sample: the position from which it continues: the batches before it are done.

    Raises:
        UserError: they do not divide a batch of the run's ramp, which is then another than the recorded one.
    """
    ramp = run.megastable.batch_rampup
    sizes = recorded.get("megastable", {}).get("batch_rampup", {}).get("chosen_micro_batch_sizes", ())
    if not ramp.chooses_micro_batch_sizes or ramp.chosen_micro_batch_sizes or not sizes:
        return run
    chosen = _with_sizes(run, tuple((start, size) for start, size in sizes))
    for size in global_batch_sizes(ramp.schedule(), first_sample):
        # Asked without a layout, which is not known here: RunPlan.of checks the division by the replicas.
        micro_batch_size = chosen.megastable.batch_rampup.ramp(1, 1).micro_batch_size_for(size)
        if size % micro_batch_size:
            raise UserError(
                f"megastable.batch_rampup: the checkpoint's chosen_micro_batch_sizes give global batch {size} "
                f"micro-batches of {micro_batch_size}, which do not divide it: the ramp is another than the "
                'checkpoint\'s. Keep that one, or replace "micro_batch_size": "auto" by micro_batch_size_steps'
            )
    return chosen


def describe_choice(plan: RunPlan) -> str:
    """Describe the chosen sizes: the run's batches at which the size differs from the one before, and their splits."""
    # A ramp of a hundred batches has few sizes, so that only the changes are worth a line.
    batches = [phase.batch for phase in plan.phases]
    changes = [batch for old, batch in pairwise(batches) if batch.micro_batch_size != old.micro_batch_size]
    splits = [
        f"batch {batch.global_batch_size}: {batch.micro_batch_size} x {batch.num_microbatches}"
        for batch in (batches[0], *changes)
    ]
    shown = ", ".join(splits[:SHOWN_SPLITS])
    if len(splits) > SHOWN_SPLITS:
        shown += f" and {len(splits) - SHOWN_SPLITS} more changes"
    return f"micro-batch size x micro-batches, chosen by {plan.run.megastable.batch_rampup.calibration}, from {shown}"


def is_data_sheet(calibration: str | None) -> bool:
    """Tell whether a run file's ``calibration`` names a device instead of a file."""
    return calibration is not None and calibration.upper() in DEVICES


def _calibration(plan: RunPlan) -> Calibration:
    """Load what the file's ``calibration`` names: a device, or else a file.

    Raises:
        UserError: neither is found, or the file cannot be used.
    """
    name = plan.run.megastable.batch_rampup.calibration
    assert name is not None
    # A device's name comes first: a file of that name can still be given as ./A100.
    if is_data_sheet(name):
        machine = Machine.of(name)
        assert machine is not None
        return Calibration(step_cost(plan, machine), machine.device.usable_bytes, f"the data sheet of {name.upper()}")
    path = expanded(name)
    if not path.is_file():
        raise UserError(f"{CALIBRATION_KEY} = {name}: is neither a file nor one of {', '.join(DEVICES)}")
    return load_calibration(path, plan)


def _with_sizes(run: RunConfig, sizes: tuple[tuple[int, int], ...]) -> RunConfig:
    # model_copy skips the rules of a run file; the callers have made sure that the sizes divide.
    settings = run.megastable
    ramp = settings.batch_rampup.model_copy(update={"chosen_micro_batch_sizes": sizes})
    return run.model_copy(update={"megastable": settings.model_copy(update={"batch_rampup": ramp})})
