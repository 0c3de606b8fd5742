"""The plan of a run beside what was measured, for the page of the run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megastable.cli.run_files import RunState, number
from megastable.cli.tables import ABSENT, significant, whole
from megastable.core.errors import UserError
from megastable.core.memory import GIB
from megastable.core.run_paths import RunPaths
from megastable.planning.forecast import Forecast, forecast
from megastable.planning.micro_batches import load_plan

CURVE_POINTS = 300


def planned(state: RunState) -> dict[str, Any]:
    """Return what the plan of the run file says: rows beside what was measured, and the curves of the same samples.

    Where there is no plan, ``note`` says why.
    """
    if state.run is None:
        return {"rows": [], "lines": {}, "note": "The plan is left out, since the run file cannot be read."}
    layout = state.layout
    devices = None if layout is None else layout.world_size
    try:
        plan, _ = load_plan(RunPaths(state.run_dir).config, devices)
        # No device is named, so that no time is predicted.
        result = forecast(plan, machine=None)
    except UserError as error:
        return {"rows": [], "lines": {}, "note": f"The plan is left out: {error}"}
    return {"rows": _rows(result, state), "lines": _lines(result, state), "note": _note(result)}


def _note(result: Forecast) -> str:
    layout = result.plan.layout
    return (
        f"Planned on {layout.world_size} devices (stages x replicas x tensor ranks: {layout.num_stages} x "
        f"{layout.data_parallel_size} x {layout.tensor_parallel_size}), from the run file; dotted in the curves, "
        "but not over time. Times and TFLOPs depend on the device: megastable plan RUN_DIR/config.json --device NAME."
    )


def _rows(result: Forecast, state: RunState) -> list[tuple[str, str, str]]:
    """Return name, plan and measurement of each value."""
    length = result.plan.length
    newest = state.newest
    seq_length = result.plan.run.megastable.model.seq_length
    phases = result.phases
    return [
        ("steps", whole(length.total_steps), _measured(newest, "step", whole)),
        ("samples", whole(length.total_samples), _measured(newest, "consumed_samples", whole)),
        ("tokens", whole(length.total_samples * seq_length), _measured(newest, "consumed_tokens", whole)),
        ("first global batch", whole(phases[0].phase.batch.global_batch_size), _first_batch(state)),
        (
            "last global batch",
            whole(phases[-1].phase.batch.global_batch_size),
            _measured(newest, "global_batch_size", whole),
        ),
        (
            "memory of the fullest device, GiB",
            significant(result.memory[result.fullest_stage].total / GIB),
            _largest(state, "device_memory_gib"),
        ),
    ]


def _measured(row: dict[str, Any], key: str, form: Callable[[float], str]) -> str:
    value = number(row, key)
    return ABSENT if value is None else form(value)


def _first_batch(state: RunState) -> str:
    return _measured(state.steps[0], "global_batch_size", whole) if state.steps else ABSENT


def _largest(state: RunState, key: str) -> str:
    values = [value for row in state.steps if (value := number(row, key)) is not None]
    return significant(max(values)) if values else ABSENT


def _lines(result: Forecast, state: RunState) -> dict[str, Any]:
    """Return the planned batch and learning rate of the samples that the run has come to."""
    end = int(min(number(state.newest, "consumed_samples") or 0, result.plan.length.total_samples))
    if end == 0:
        return {}
    places = {(end * index) // CURVE_POINTS for index in range(CURVE_POINTS)}
    places.update(entry.phase.first_sample for entry in result.phases if entry.phase.first_sample < end)
    seq_length = result.plan.run.megastable.model.seq_length
    x: dict[str, list[float]] = {"samples": [], "tokens": [], "step": []}
    batches: list[float] = []
    rates: list[float] = []
    index = 0
    for sample in sorted(places):
        while index + 1 < len(result.phases) and result.phases[index + 1].phase.first_sample <= sample:
            index += 1
        phase = result.phases[index].phase
        # The curves of a run stand at the ends of its steps.
        steps = (sample - phase.first_sample) // phase.batch.global_batch_size
        start = phase.first_sample + steps * phase.batch.global_batch_size
        stop = start + phase.batch.global_batch_size
        x["samples"].append(stop)
        x["tokens"].append(stop * seq_length)
        x["step"].append(phase.first_step + steps + 1)
        batches.append(phase.batch.global_batch_size)
        rates.append(result.plan.learning_rate(start, phase.batch))
    return {"global_batch_size": {"x": x, "y": batches}, "lr": {"x": x, "y": rates}}
