"""What a run will take, for people and as JSON."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.table import Table

from megastable.cli.cells import duration, percent, significant, whole
from megastable.planning.forecast import Forecast

UNKNOWN = "unknown"
GIB = 2**30
LEAST_WIDTH = 140
RAMP_COLUMNS = ("step", "sample", "steps", "batch", "micro-batches", "bubble", "idle", "a step", "TFLOPs", "time")
SHOWN_PHASES = 12
"""A longer ramp is shown by its first and last phases, and some between."""
MEMORY_COLUMNS = ("weights", "gradients", "master_weights", "moments", "activations", "buffers", "update", "total")


def as_json(values: Any) -> str:
    """Plain values, as a program reads them."""
    return json.dumps(values, indent=2, ensure_ascii=False)


def show(forecast: Forecast, name: str, assumed_devices: bool) -> None:
    """Print the layout, the ramp with its speed, the memory of every stage, and what it all rests on."""
    console = wide_console()
    for line in _summary(forecast, name, assumed_devices):
        console.print(line)
    console.print(_rampmake_table(forecast))
    console.print(_memorymake_table(forecast))
    console.print(_fit(forecast))
    for line in forecast.assumptions:
        console.print(f"assumed: {line}")


def _summary(forecast: Forecast, name: str, assumed_devices: bool) -> list[str]:
    layout, length, run = forecast.plan.layout, forecast.plan.length, forecast.plan.run
    seconds = forecast.seconds_to_train
    tokens = length.total_samples * run.megastable.model.seq_length
    note = " (assumed: one replica; --devices N sets it)" if assumed_devices else ""
    return [
        f"{name}: {length.total_steps:,} steps, {length.total_samples:,} samples, {tokens:,} tokens",
        f"layout: {layout.num_stages} stages x {layout.data_parallel_size} replicas x {layout.tensor_parallel_size} "
        f"tensor ranks = {layout.world_size} devices{note}",
        f"time to train: {UNKNOWN if seconds is None else duration(seconds)}",
    ]


def _rampmake_table(forecast: Forecast) -> Table:
    table = make_table(f"ramp: {len(forecast.phases)} phases", *RAMP_COLUMNS)
    for index in shown_indices(len(forecast.phases), SHOWN_PHASES):
        entry = forecast.phases[index]
        phase, batch, speed = entry.phase, entry.phase.batch, entry.speed
        table.add_row(
            whole(phase.first_step),
            whole(phase.first_sample),
            whole(phase.num_steps),
            whole(batch.global_batch_size),
            f"{batch.num_microbatches} of {batch.micro_batch_size}",
            percent(entry.bubble),
            percent(entry.idle_share),
            UNKNOWN if speed is None else duration(speed.step_seconds),
            UNKNOWN if speed is None else significant(speed.tflops_per_device),
            UNKNOWN if speed is None else duration(phase.num_steps * speed.step_seconds),
        )
    table.caption = "idle: the bubble and what unequal stages add; TFLOPs: model operations, per device"
    return table


def wide_console(least_width: int = LEAST_WIDTH) -> Console:
    """One that does not squeeze tables where the output is no terminal."""
    return Console(highlight=False, soft_wrap=True, width=max(Console().width, least_width))


def make_table(title: str, *headings: str) -> Table:
    """A table without lines, whose columns are never cut."""
    table = Table(title=title, title_justify="left", caption_justify="left", box=None, padding=(0, 3, 0, 0))
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def shown_indices(count: int, most: int) -> list[int]:
    """At most ``most`` of ``count`` entries, evenly spread, with the first and the last."""
    if count <= most:
        return list(range(count))
    return sorted({round(index * (count - 1) / (most - 1)) for index in range(most)})


def _memorymake_table(forecast: Forecast) -> Table:
    headings = (heading.replace("_", " ") for heading in MEMORY_COLUMNS)
    table = make_table("memory of a device, GiB, by stage", "stage", "layers", *headings)
    for stage, use in enumerate(forecast.memory):
        kinds = use.by_kind()
        held = forecast.plan.cut.descriptions[stage]
        table.add_row(str(stage), held, *(f"{kinds[kind] / GIB:.2f}" for kind in MEMORY_COLUMNS))
    table.caption = (
        f"predicted imbalance of the stages {percent(forecast.plan.cut.imbalance)}; "
        "total: the state, and the larger of activations + buffers and update"
    )
    return table


def _fit(forecast: Forecast) -> str:
    if forecast.usable_bytes is None:
        return f"fits: {UNKNOWN}, {'no device is named' if forecast.calibration is None else 'its memory is not known'}"
    stage, machine = forecast.fullest_stage, forecast.machine
    needed = forecast.memory[stage].total / GIB
    line = f"fits: {'yes' if forecast.fits else 'NO'}; stage {stage} needs {needed:.1f} of "
    if machine is None:
        return f"{line}{forecast.usable_bytes / GIB:.1f} GiB"
    device = machine.device
    return f"{line}{device.memory_gib:g} GiB, of which {device.reserved_gib:g} are kept for the driver and libraries"
