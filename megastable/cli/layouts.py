"""The layouts of a run on so many devices, ranked, for people and as JSON."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import asdict

from rich.console import Console

from megastable.cli.cells import duration
from megastable.cli.plan import as_json, make_table, wide_console
from megastable.config import RunConfig
from megastable.core.errors import UserError
from megastable.planning.data_sheet_cost import Machine
from megastable.planning.search import Candidate, search_layouts

SHOWN_LAYOUTS = 15
SHOWN_REASONS = 10
COLUMNS = ("stages", "replicas", "tensor", "micro-batch", "recompute", "ramp from", "time to train", "GiB")


def print_layouts(run: RunConfig, devices: int, machine: Machine | None, name: str, json_wanted: bool) -> None:
    """Search and print.

    Raises:
        UserError: no device is named, so that there is nothing to rank by.
    """
    if machine is None:
        raise UserError("--search ranks by time, so it needs --device (or --peak-tflops and --memory-gib)")
    layouts = search_layouts(run, devices, machine)
    assumptions = machine.assumptions(run.number_format)
    if json_wanted:
        print(as_json({"layouts": [asdict(layout) for layout in layouts], "assumptions": assumptions}))
    else:
        _show(layouts, f"{name} on {devices} x {machine.device.name}", assumptions)


def _show(layouts: list[Candidate], name: str, assumptions: list[str]) -> None:
    console = wide_console()
    feasible = [layout for layout in layouts if layout.reason is None]
    table = make_table(f"{name}: {len(feasible)} of {len(layouts)} layouts are feasible; the fastest", *COLUMNS)
    for layout in feasible[:SHOWN_LAYOUTS]:
        table.add_row(
            *map(str, (layout.num_stages, layout.data_parallel_size, layout.tensor_parallel_size)),
            str(layout.micro_batch_size),
            "yes" if layout.activation_checkpointing else "no",
            "-" if layout.ramp_start is None else str(layout.ramp_start),
            duration(layout.seconds_to_train or 0.0),
            f"{layout.memory_gib:.1f}",
        )
    console.print(table)
    _show_reasons(console, layouts)
    for line in assumptions:
        console.print(f"assumed: {line}")


def _show_reasons(console: Console, layouts: list[Candidate]) -> None:
    """The reasons that rule most layouts out, N for a number; --json has every layout's own."""
    reasons = Counter(_kind(layout.reason) for layout in layouts if layout.reason is not None)
    for reason, count in reasons.most_common(SHOWN_REASONS):
        console.print(f"infeasible, {count}: {reason}")
    if len(reasons) > SHOWN_REASONS:
        console.print(f"infeasible, {len(reasons) - SHOWN_REASONS} more reasons: see --json")


def _kind(reason: str) -> str:
    """The same reason of several layouts: its numbers left out, but not those of names."""
    return re.sub(r"(?<![\w.])[\d.]*\d", "N", reason)
