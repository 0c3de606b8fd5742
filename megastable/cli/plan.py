"""What a run will take: the forecast of its own layout, or all layouts ranked; for people and as JSON."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megastable.cli.pictures import plot_forecast
from megastable.cli.tables import (
    ABSENT,
    UNKNOWN,
    as_json,
    duration,
    make_table,
    percent,
    shown_indices,
    significant,
    whole,
    wide_console,
)
from megastable.cli.timeline import check_timeline_suffix, write_timelines
from megastable.core.errors import UserError, shown
from megastable.core.memory import GIB
from megastable.planning.calibration import CalibrationFile
from megastable.planning.data_sheet_cost import Machine
from megastable.planning.forecast import Basis, Forecast, PhaseForecast, forecast
from megastable.planning.memory import host_copies
from megastable.planning.micro_batches import load_plan
from megastable.planning.run_plan import RunPlan, load_run
from megastable.planning.search import Candidate, search_layouts
from megastable.planning.timelines import first_phase_timelines

RAMP_COLUMNS = ("step", "sample", "steps", "batch", "micro-batches", "bubble", "idle", "a step", "TFLOPs", "time")
SHOWN_PHASES = 12
"""A longer ramp is shown by its first and last phases, and some between."""
LAYOUT_COLUMNS = ("stages", "replicas", "tensor", "micro-batch", "recompute", "ramp from", "time to train", "GiB")
SHOWN_LAYOUTS = 15
SHOWN_REASONS = 10


@dataclass(frozen=True)
class PlanRequest:
    """A run file, and the devices and files from which its times are predicted, as the command line names them."""

    config: Path
    overrides: list[str]
    devices: int | None
    device: str | None
    peak_tflops: float | None
    memory_gib: float | None
    efficiency: float | None
    calibration: Path | None
    save_calibration: Path | None


# The forecast of one layout


def print_forecast(request: PlanRequest, picture: Path | None, timeline: Path | None, json_wanted: bool) -> None:
    """Forecast the run on its own layout, write the picture and the timeline that are asked for, and print.

    Args:
        picture: of the ramp.
        timeline: of a step, a page or a trace.

    Raises:
        UserError: the run file or an option is refused, or a file cannot be written.
    """
    if timeline is not None:
        check_timeline_suffix(timeline)
    # A calibration that is measured now may be the file by which the run's micro-batch sizes are to be chosen, and
    # does not exist yet: measure with the file's own size, and choose when the calibration is written.
    plan, devices_assumed = load_plan(
        request.config, request.devices, choose=request.save_calibration is None, overrides=request.overrides
    )
    basis = Basis.of(
        plan,
        request.device,
        request.peak_tflops,
        request.memory_gib,
        request.efficiency,
        request.calibration,
        request.save_calibration,
        probe=probe_this_cpu,
    )
    if request.save_calibration is not None:
        plan, devices_assumed = load_plan(request.config, request.devices, overrides=request.overrides)
    result = forecast(plan, basis.machine, basis.calibration)
    # Before anything is printed, so that a picture that is refused leaves one message and no output.
    if picture is not None:
        plot_forecast(result, picture)
    if timeline is not None:
        write_timelines(first_phase_timelines(plan, basis), str(request.config), timeline)
    if json_wanted:
        print(as_json(result.as_dict()))
    else:
        _show_forecast(result, str(request.config), devices_assumed)


def probe_this_cpu(plan: RunPlan) -> CalibrationFile:
    """Measure what a step of a planned run costs on this machine, in about ten seconds."""
    from megastable.training.cpu_probe import probe  # loads torch

    return probe(plan)


def _show_forecast(result: Forecast, name: str, devices_assumed: bool) -> None:
    """Print the layout, the ramp with its speed, the memory of every stage, and what it all rests on."""
    console = wide_console()
    for line in _summary(result, name, devices_assumed):
        console.print(shown(line))
    console.print(_ramp_table(result))
    console.print(_memory_table(result))
    console.print(shown(_fit(result)))
    console.print(shown(str(host_copies(result.plan))))
    _print_assumptions(console, result.assumptions)


def _summary(result: Forecast, name: str, devices_assumed: bool) -> list[str]:
    layout = result.plan.layout
    length = result.plan.length
    tokens = length.total_samples * result.plan.run.megastable.model.seq_length
    note = ""
    if devices_assumed:
        note = " (assumed: one replica; --devices N sets it)"
    seconds = result.seconds_to_train
    time_to_train = UNKNOWN if seconds is None else duration(seconds)
    return [
        f"{name}: {length.total_steps:,} steps, {length.total_samples:,} samples, {tokens:,} tokens",
        f"layout: {layout.num_stages} stages x {layout.data_parallel_size} replicas x {layout.tensor_parallel_size} "
        f"tensor ranks = {layout.world_size} devices{note}",
        f"time to train: {time_to_train}",
    ]


def _ramp_table(result: Forecast) -> Table:
    table = make_table(f"ramp: {len(result.phases)} phases", *RAMP_COLUMNS)
    for index in shown_indices(len(result.phases), SHOWN_PHASES):
        entry = result.phases[index]
        phase = entry.phase
        batch = phase.batch
        table.add_row(
            whole(phase.first_step),
            whole(phase.first_sample),
            whole(phase.num_steps),
            whole(batch.global_batch_size),
            f"{batch.num_microbatches} of {batch.micro_batch_size}",
            percent(entry.bubble),
            percent(entry.idle_share),
            *_speed_cells(entry),
        )
    table.caption = "idle: the bubble and what unequal stages add; TFLOPs: model operations, per device"
    return table


def _speed_cells(entry: PhaseForecast) -> tuple[str, str, str]:
    """Format a phase's time of a step, its speed, and the time of all its steps."""
    if entry.speed is None:
        return UNKNOWN, UNKNOWN, UNKNOWN
    step_seconds = entry.speed.step_seconds
    return (
        duration(step_seconds),
        significant(entry.speed.tflops_per_device),
        duration(entry.phase.num_steps * step_seconds),
    )


def _memory_table(result: Forecast) -> Table:
    kinds = (kind.replace("_", " ") for kind in result.memory[0].by_kind())
    table = make_table("memory of a device, GiB, by stage", "stage", "layers", *kinds)
    cut = result.plan.cut
    for stage, use in enumerate(result.memory):
        cells = (f"{num_bytes / GIB:.2f}" for num_bytes in use.by_kind().values())
        table.add_row(str(stage), cut.descriptions[stage], *cells)
    # The total is no sum of its row: the update's buffers are made after the activations have been freed.
    table.caption = (
        f"predicted imbalance of the stages {percent(cut.imbalance)}; "
        "total: the state, and the larger of activations + buffers and update"
    )
    return table


def _fit(result: Forecast) -> str:
    if result.usable_bytes is None:
        if result.calibration is None:
            return f"fits: {UNKNOWN}, no device is named"
        return f"fits: {UNKNOWN}, its memory is not known"
    verdict = "yes" if result.fits else "NO"
    stage = result.fullest_stage
    needed_gib = result.memory[stage].total / GIB
    line = f"fits: {verdict}; stage {stage} needs {needed_gib:.1f} of "
    if result.machine is None:
        return f"{line}{result.usable_bytes / GIB:.1f} GiB"
    device = result.machine.device
    return f"{line}{device.memory_gib:g} GiB, of which {device.reserved_gib:g} are kept for the driver and libraries"


def _print_assumptions(console: Console, assumptions: list[str]) -> None:
    for line in assumptions:
        console.print(f"assumed: {shown(line)}")


# The search over layouts


def print_layouts(request: PlanRequest, json_wanted: bool) -> None:
    """Rank the layouts that the devices allow, and print.

    Raises:
        UserError: the run file or an option is refused, or no device is named, so that nothing ranks the layouts.
    """
    if request.calibration or request.save_calibration:
        raise UserError("--search: measured times belong to one layout, so it takes neither calibration option")
    machine = Machine.of(request.device, request.peak_tflops, request.memory_gib, request.efficiency)
    run, devices = load_run(request.config, request.devices, request.overrides)
    if machine is None:
        raise UserError("--search ranks by time, so it needs --device (or --peak-tflops and --memory-gib)")
    layouts = search_layouts(run, devices, machine)
    assumptions = machine.assumptions(run.number_format)
    if json_wanted:
        print(as_json({"layouts": [asdict(layout) for layout in layouts], "assumptions": assumptions}))
    else:
        _show_layouts(layouts, f"{request.config} on {devices} x {machine.device.name}", assumptions)


def _show_layouts(layouts: list[Candidate], name: str, assumptions: list[str]) -> None:
    console = wide_console()
    feasible = [layout for layout in layouts if layout.reason is None]
    table = make_table(
        f"{shown(name)}: {len(feasible)} of {len(layouts)} layouts are feasible; the fastest", *LAYOUT_COLUMNS
    )
    for layout in feasible[:SHOWN_LAYOUTS]:
        table.add_row(
            str(layout.num_stages),
            str(layout.data_parallel_size),
            str(layout.tensor_parallel_size),
            str(layout.micro_batch_size),
            "yes" if layout.activation_checkpointing else "no",
            ABSENT if layout.ramp_start is None else str(layout.ramp_start),
            duration(layout.seconds_to_train or 0.0),  # known of every feasible layout
            f"{layout.memory_gib:.1f}",
        )
    console.print(table)
    _print_reasons(console, layouts)
    _print_assumptions(console, assumptions)


def _print_reasons(console: Console, layouts: list[Candidate]) -> None:
    """Print the reasons that rule most layouts out, N for a number; --json has the reason of every layout."""
    reasons = Counter(_without_numbers(layout.reason) for layout in layouts if layout.reason is not None)
    for reason, count in reasons.most_common(SHOWN_REASONS):
        console.print(f"infeasible, {count}: {shown(reason)}")
    if len(reasons) > SHOWN_REASONS:
        console.print(f"infeasible, {len(reasons) - SHOWN_REASONS} more reasons: see --json")


def _without_numbers(reason: str) -> str:
    """Replace the numbers of a reason, so that it counts as the same for several layouts."""
    # A number within a name, such as that of A100, stays: no letter or point may stand before what is replaced.
    return re.sub(r"(?<![\w.])[\d.]*\d", "N", reason)
