"""What the page of a run shows, as one object for JSON: curves, layers, events, and the plan beside them."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice, pairwise
from typing import Any

from megastable.cli.run_fields import HEADROOM_KEYS
from megastable.cli.run_files import Row, RunState, count, layers_of, number
from megastable.cli.thinning import bucket_bounds, thinned
from megastable.core.errors import shown

MOST_POINTS = 3000
"""Of one curve."""
MOST_COLUMNS = 300
"""Watched steps of the heat map."""
MOST_EVENTS = 2000
MOST_DATA_CHARACTERS = 2000
"""Of the numbers beside an event."""
SHORT_RUN_SECONDS = 7200
"""A shorter run is drawn over minutes instead of hours."""
LARGEST_OF_FORMAT = {"fp32": 3.4028234663852886e38, "bf16": 3.3895313892515355e38, "fp16": 65504.0}

Positions = Mapping[str, Sequence[float]]
"""Name of an axis -> where each of some steps stands on it."""


@dataclass(frozen=True)
class Line:
    """One curve: the key of a step's row, and its name."""

    key: str
    name: str


@dataclass(frozen=True)
class Panel:
    """Curves that share an axis of values."""

    title: str
    lines: tuple[Line, ...]
    log: bool = False
    stepped: bool = False
    """Drawn as a value for every step, constant within it."""


PANELS = (
    Panel("loss, nats per token", (Line("loss", "training"), Line("eval_loss", "validation"))),
    Panel("gradient norm, before clipping", (Line("grad_norm", "gradient norm"),), log=True),
    Panel("learning rate", (Line("lr", "learning rate"),)),
    Panel("global batch, samples", (Line("global_batch_size", "global batch"),), stepped=True),
    Panel("loss scale", (Line("loss_scale", "loss scale"),), log=True, stepped=True),
    Panel(
        "TFLOPs per device",
        (Line("tflops_per_device", "model"), Line("hardware_tflops_per_device", "executed")),
    ),
    Panel("memory of the fullest process, GiB", (Line("host_memory_gib", "host"), Line("device_memory_gib", "device"))),
)
HEAT_MAPS = {"grad_norm": "gradient norm", "update_ratio": "update / weight", "headroom": "headroom used"}
"""Value of a layer -> its name."""


@dataclass(frozen=True)
class TimeUnit:
    """A unit in which the time of a run is shown."""

    name: str
    seconds: float


class History:
    """The steps of a run that have a number, and where they stand on every axis."""

    def __init__(self, state: RunState) -> None:
        self.state = state
        self.rows = [row for row in state.steps if count(row, "step") is not None]
        self._seconds = self._running("step_seconds", adds=True)

    @property
    def time_unit(self) -> TimeUnit:
        """Return minutes for a short run, hours for a longer one."""
        if not self._seconds or self._seconds[-1] < SHORT_RUN_SECONDS:
            return TimeUnit("minutes", 60.0)
        return TimeUnit("hours", 3600.0)

    def positions(self, unit: TimeUnit) -> dict[str, list[float]]:
        """Return where each row stands, at the end of its step."""
        return {
            "samples": self._running("consumed_samples"),
            "tokens": self._running("consumed_tokens"),
            "step": self._running("step"),
            "time": [_short(seconds / unit.seconds, digits=9) for seconds in self._seconds],
        }

    def _running(self, key: str, adds: bool = False) -> list[float]:
        """Return a value that never falls; where a row has none, that of the row before."""
        values = []
        last = 0.0
        for row in self.rows:
            value = number(row, key) or 0.0
            last = last + max(0.0, value) if adds else max(last, value)
            values.append(last)
        return values


def _name(state: RunState) -> str:
    return shown(state.run_dir.absolute().name)


def _short(value: float, digits: int = 6) -> float:
    return float(f"{value:.{digits}g}")


def report_data(state: RunState, status: str, config: str, compared: RunState | None) -> dict[str, Any]:
    """Collect what the page shows.

    Args:
        status: a sentence on the run.
        config: the text of the run file.
        compared: another run, whose curves stand beside.
    """
    history = History(state)
    unit = history.time_unit
    positions = history.positions(unit)
    heat_map = _heat_map(history, positions)
    notes = [*state.faults, *_thinning_notes(history)]
    runs = [{"name": _name(state), "lines": _lines(history, positions)}]
    if compared is not None:
        notes += [f"compared run: {fault}" for fault in compared.faults]
        other = History(compared)
        runs.append({"name": _name(compared), "lines": _lines(other, other.positions(unit))})
        if len(other.rows) > MOST_POINTS:
            notes.append(f"The compared run has {len(other.rows):,} steps, and is thinned alike.")
    return {
        "status": status,
        "notes": notes,
        "axes": [
            {"key": "samples", "label": "samples"},
            {"key": "tokens", "label": "tokens"},
            {"key": "step", "label": "step"},
            {"key": "time", "label": f"{unit.name} of stepping"},
        ],
        "panels": [asdict(panel) for panel in PANELS],
        "runs": runs,
        "events": _events(history, positions),
        "heat_map": heat_map,
        "config": config,
    }


def _thinning_notes(history: History) -> list[str]:
    notes = []
    if len(history.rows) > MOST_POINTS:
        notes.append(
            f"The run has {len(history.rows):,} steps. A curve shows at most {MOST_POINTS:,} points: of neighbouring "
            "steps the smallest and the largest value, and one that is not finite. Zooming in shows no more."
        )
    watched = sum(bool(layers_of(row)) for row in history.rows)
    if watched > MOST_COLUMNS:
        notes.append(
            f"{watched:,} steps were watched by layer. The heat map has {MOST_COLUMNS} columns: the largest value of "
            "neighbouring watched steps."
        )
    if len(history.state.events) > MOST_EVENTS:
        notes.append(f"Of {len(history.state.events):,} events the newest {MOST_EVENTS:,} are shown.")
    return notes


# Curves


def _lines(history: History, positions: Positions) -> dict[str, Any]:
    """Return every curve of which the run has a value, by its key."""
    found = {}
    for line in (line for panel in PANELS for line in panel.lines):
        curve = _curve(history.rows, line.key, positions)
        if curve["y"]:
            found[line.key] = curve
    return found


def _curve(rows: Sequence[Row], key: str, positions: Positions) -> dict[str, Any]:
    present = [index for index, row in enumerate(rows) if key in row]
    values = [number(rows[index], key) for index in present]
    # A value that no step has, such as the device's memory on a CPU, is null throughout, and no curve.
    if all(value is None for value in values):
        return {"x": {}, "y": []}
    kept = thinned(values, MOST_POINTS)
    return {
        "x": {axis: [places[present[index]] for index in kept] for axis, places in positions.items()},
        "y": [None if (value := values[index]) is None else _short(value) for index in kept],
    }


# Layers


def _heat_map(history: History, positions: Positions) -> dict[str, Any]:
    """Return the layers over the watched steps, a matrix for each value."""
    watched = [index for index, row in enumerate(history.rows) if layers_of(row)]
    names = list(dict.fromkeys(name for index in watched for name in layers_of(history.rows[index])))
    bounds = bucket_bounds(len(watched), min(len(watched), MOST_COLUMNS)) if watched else []
    columns = [watched[start:stop] for start, stop in pairwise(bounds)]
    largest = None
    if history.state.run is not None:
        largest = LARGEST_OF_FORMAT[history.state.run.number_format]
    maps = []
    for key, title in HEAT_MAPS.items():
        grid = [[_cell(history.rows, column, name, key, largest) for column in columns] for name in names]
        if any(cell is not None for line in grid for cell in line):
            maps.append({"title": title, "cells": grid})
    return {
        "x": {axis: [places[column[-1]] for column in columns] for axis, places in positions.items()},
        "layers": names,
        "maps": maps,
    }


def _cell(rows: Sequence[Row], column: Sequence[int], name: str, key: str, largest: float | None) -> float | str | None:
    """Return the largest value of a layer in some steps; words where one is not finite, None where there is none."""
    values = []
    for index in column:
        layer = layers_of(rows[index]).get(name, {})
        values += _headrooms(layer, largest) if key == "headroom" else _values(layer, key)
    if not values:
        return None
    finite = [value for value in values if value is not None]
    # Worse than any number, as in the curves.
    return "not finite" if len(finite) < len(values) else _short(max(finite), digits=4)


def _values(layer: Row, key: str) -> list[float | None]:
    return [number(layer, key)] if key in layer else []


def _headrooms(layer: Row, largest: float | None) -> list[float | None]:
    if largest is None:
        return []
    values = [value for key in HEADROOM_KEYS for value in _values(layer, key)]
    return [None if value is None else value / largest for value in values]


# Events


def _events(history: History, positions: Positions) -> list[dict[str, Any]]:
    steps = positions["step"]
    events = history.state.events
    return [_event(event, steps, positions) for event in islice(events, max(0, len(events) - MOST_EVENTS), len(events))]


def _event(event: Row, steps: Sequence[float], positions: Positions) -> dict[str, Any]:
    step = count(event, "step")
    place = None
    if step is not None and steps:
        # An event of a step that was not recorded, as before the first, stands at the next one that was.
        index = min(bisect_left(steps, step), len(steps) - 1)
        place = {axis: places[index] for axis, places in positions.items()}
    data = event.get("data")
    text = json.dumps(data, ensure_ascii=False) if data else ""
    if len(text) > MOST_DATA_CHARACTERS:
        text = text[:MOST_DATA_CHARACTERS] + " …"
    return {
        "x": place,
        "step": step,
        "kind": str(event.get("kind", "event")),
        "text": str(event.get("text", "")),
        "data": text,
    }
