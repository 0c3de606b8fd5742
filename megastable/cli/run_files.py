"""A run as the files of its folder describe it, kept up to date while they grow; nothing is ever written."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any, BinaryIO

from megastable.config import RunConfig, load_run_file
from megastable.core.batch_rampup import BatchRampup, RunLength
from megastable.core.errors import UserError, shown
from megastable.core.layout import ParallelLayout
from megastable.core.run_paths import RunPaths

Row = dict[str, Any]
"""One line of metrics.jsonl or events.jsonl."""

MOST_BYTES = 16 * 2**20
"""Of a longer file, only so many bytes at its end are read, unless the whole is asked for."""
KEPT_STEPS = 4000
"""Far enough back for the last evaluation."""
KEPT_EVENTS = 50
LARGEST_NUMBER = 1e300
"""Sums and differences of a few such numbers are still finite."""
LARGEST_COUNT = 2**62
"""No run consumes as many samples."""
PACE_STEPS = 20
"""Steps from which the step time and the time left are estimated."""


def number(row: Row, key: str) -> float | None:
    """Return a finite number, or None: the key is absent, or its value is null, not finite or no number at all."""
    value = row.get(key)
    # bool is a subclass of int, but `true` is no number in JSON, whose whole numbers may have any number of digits.
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST_NUMBER
    if not is_number:
        return None
    return value


def count(row: Row, key: str) -> int | None:
    """Return a whole number from 0 up to what a run can reach; None for everything else."""
    value = row.get(key)
    # type() and not isinstance(): to Python, JSON's true is the number 1.
    return value if type(value) is int and 0 <= value <= LARGEST_COUNT else None


def layers_of(row: Row) -> dict[str, Row]:
    """Return the layers of a monitored step, in the order of the model; nothing for another step."""
    layers = row.get("layers")
    if not isinstance(layers, dict):
        return {}
    return {name: values for name, values in layers.items() if isinstance(values, dict)}


class Tail:
    """Reads the whole lines of a file that grows, each of them once.

    A resumed run replaces its metrics by a shorter file, which is noticed by the last line that was read: where it no
    longer stands before the place of reading, the file is read from its beginning.

    Args:
        whole: also read what lies before the last ``MOST_BYTES``.
    """

    def __init__(self, path: Path, whole: bool = False) -> None:
        self.path = path
        self._whole = whole
        self.fault = ""
        """Why the file could not be read; empty where it could, or where it does not exist yet."""
        self.changed_unix: float | None = None
        self._offset = 0
        self._last_line = b""

    def read(self) -> tuple[list[Row], bool]:
        """Return the objects on the new lines, and whether they replace all that was read before.

        Half a line at the end waits for its other half; a line that is no JSON object is left out.
        """
        self.fault = ""
        try:
            with open(self.path, "rb") as file:
                lines, afresh = self._new_lines(file)
                self.changed_unix = os.fstat(file.fileno()).st_mtime
        except FileNotFoundError:
            return [], False
        except OSError as error:  # no permission, or a network folder out of reach
            self.fault = f"{self.path.name} cannot be read: {error.strerror}"
            return [], False
        return list(objects_in(lines)), afresh

    def _new_lines(self, file: BinaryIO) -> tuple[list[bytes], bool]:
        # The size alone would not do: a file that was replaced may have grown past the old place since.
        file.seek(self._offset - len(self._last_line))
        is_replaced = file.read(len(self._last_line)) != self._last_line
        unread_bytes = os.fstat(file.fileno()).st_size - self._offset
        is_too_long = unread_bytes > MOST_BYTES and not self._whole
        afresh = is_replaced or is_too_long
        if afresh:
            # Where a line is cut by this, what is left of it is no object.
            self._offset = 0 if self._whole else max(0, file.seek(0, os.SEEK_END) - MOST_BYTES)
            self._last_line = b""
            file.seek(self._offset)
        text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        lines = whole.splitlines(keepends=True)
        self._offset += len(whole)
        if lines:
            self._last_line = lines[-1]
        return lines, afresh


def _safe(value: Any) -> Any:
    """Return a row, or a value of it, with names and texts that are safe to show: the folder may be somebody else's."""
    if isinstance(value, str):
        return shown(value, keep="\n")
    if isinstance(value, dict):
        return {shown(key): _safe(inner) for key, inner in value.items()}
    return value


def objects_in(lines: list[bytes]) -> Iterator[Row]:
    """Yield the JSON objects among lines, and leave out whatever else stands there."""
    for line in lines:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):  # bytes that are no UTF-8 are ValueErrors too
            continue
        if isinstance(row, dict):
            yield row


@dataclass
class RunState:
    """A run as far as its files have been read."""

    run_dir: Path
    run: RunConfig | None = None
    steps: deque[Row] = field(default_factory=lambda: deque(maxlen=KEPT_STEPS))
    events: deque[Row] = field(default_factory=lambda: deque(maxlen=KEPT_EVENTS))
    newest_step_unix: float | None = None
    faults: list[str] = field(default_factory=list)
    """Files that could not be read, one sentence each."""

    @property
    def newest(self) -> Row:
        """Return the newest step; an empty row before the first."""
        return self.steps[-1] if self.steps else {}

    @property
    def length(self) -> RunLength | None:
        """Return the length of the whole run: what is done, and the steps that the run file leaves; None without it.

        A run that was resumed with another ramp or batch has not come the way that the file says.
        """
        if self.run is None:
            return None
        step = count(self.newest, "step")
        consumed = count(self.newest, "consumed_samples")
        if step is None or consumed is None:
            return _length_after(self.run, 0, 0)
        return _length_after(self.run, step, consumed)

    def newest_with(self, *keys: str) -> Row:
        """Return the newest step that has one of the keys: not every step is evaluated or monitored."""
        return next((row for row in reversed(self.steps) if any(key in row for key in keys)), {})

    def recent(self, count: int) -> list[Row]:
        """Return the newest ``count`` steps, oldest first."""
        return list(islice(self.steps, max(0, len(self.steps) - count), None))

    @property
    def step_seconds(self) -> float | None:
        """Return the median step time of the recent steps; None where none of them has one."""
        seconds = [number(row, "step_seconds") for row in self.recent(PACE_STEPS)]
        known = [value for value in seconds if value is not None]
        if not known:
            return None
        # The median, which a single slow step does not move.
        return median(known)

    @property
    def seconds_left(self) -> float | None:
        """Estimate the time to the end of the run; None where the end or the pace is unknown."""
        consumed = number(self.newest, "consumed_samples")
        paces = [(number(row, "global_batch_size"), number(row, "step_seconds")) for row in self.recent(PACE_STEPS)]
        known = [(samples, seconds) for samples, seconds in paces if samples and seconds]  # zero cannot be divided by
        if self.length is None or consumed is None or not known:
            return None
        # The pace is one of samples, not of steps: under a ramp, steps grow longer.
        samples_per_second = sum(samples for samples, _ in known) / sum(seconds for _, seconds in known)
        return max(0.0, self.length.total_samples - consumed) / samples_per_second

    @property
    def layout(self) -> ParallelLayout | None:
        """Return the stages and tensor ranks of the run file, with the replicas of the newest step's batch."""
        global_batch_size = number(self.newest, "global_batch_size")
        micro_batch_size = number(self.newest, "micro_batch_size")
        num_microbatches = number(self.newest, "num_microbatches")
        if self.run is None or not (global_batch_size and micro_batch_size and num_microbatches):
            return None
        sections = self.run.megastable
        # The same run file serves any number of replicas, so that only the sizes of a batch give it away.
        replicas = max(1, round(global_batch_size / (micro_batch_size * num_microbatches)))
        return ParallelLayout(sections.pipeline.num_stages, replicas, sections.tensor_parallel.size)

    def add_step(self, row: Row) -> None:
        """Append a step, in place of an older one with its number and of all that came after that one."""
        # A resumed run takes the steps after its checkpoint again.
        step = number(row, "step")
        while step is not None and self.steps and (number(self.newest, "step") or 0) >= step:
            self.steps.pop()
        self.steps.append(row)


class RunReader:
    """Keeps a ``RunState`` up to date with the files of a run folder: its newest part, or the ``whole`` run.

    Raises:
        UserError: the folder is no run folder.
    """

    def __init__(self, run_dir: Path, whole: bool = False) -> None:
        paths = RunPaths(run_dir)
        if not (os.path.isfile(paths.config) or os.path.isfile(paths.metrics)):
            raise UserError(
                f"{run_dir} is no run folder: it has neither {paths.config.name} nor {paths.metrics.name}. Name the "
                "folder that a run writes, e.g. runs/quickstart"
            )
        self.state = RunState(run_dir)
        if whole:
            self.state = RunState(run_dir, steps=deque(), events=deque())
        self._config = paths.config
        self._config_version = (0, 0)
        self._config_fault = ""
        self._metrics = Tail(paths.metrics, whole)
        self._events = Tail(paths.events, whole)

    def refresh(self, now_unix: float) -> RunState:
        """Read what is new."""
        self._read_config()
        self._read_steps(now_unix)
        events, afresh = self._events.read()
        if afresh:
            self.state.events.clear()
        self.state.events.extend(map(_safe, events))
        faults = (self._config_fault, self._metrics.fault, self._events.fault)
        self.state.faults = [fault for fault in faults if fault]
        return self.state

    def _read_steps(self, now_unix: float) -> None:
        rows, afresh = self._metrics.read()
        if rows:
            # The first time, the file knows when it was written; later this clock does, which may differ from the
            # clock of the machine that writes.
            if self.state.newest_step_unix is None:
                self.state.newest_step_unix = self._metrics.changed_unix
            else:
                self.state.newest_step_unix = now_unix
        if afresh:
            self.state.steps.clear()
        for row in rows:
            self.state.add_step(_safe(row))

    def _read_config(self) -> None:
        try:
            status = self._config.stat()
            version = (status.st_mtime_ns, status.st_size)
            if version != self._config_version:
                # Remembered before it is read, so that a file that is refused is not read again at every refresh.
                self._config_version = version
                self.state.run = load_run_file(self._config)
                self._config_fault = ""
        except OSError as error:
            self._config_fault = f"{self._config.name} cannot be read: {error.strerror}"
        except UserError as error:  # a run of another version of this program
            self._config_fault = str(error).replace(str(self._config), self._config.name)


def _length_after(run: RunConfig, step: int, consumed_samples: int) -> RunLength:
    """Count the steps and samples of a run that has done ``step`` steps of ``consumed_samples`` together."""
    training = run.megastable.training
    # The samples of a step do not depend on how they are split, and the replicas are unknown here: ones will do.
    ramp = BatchRampup(run.megastable.batch_rampup.schedule(), micro_batch_size=1, data_parallel_size=1)
    phases = ramp.phases(
        total_samples=training.total_samples,
        total_steps=training.total_steps,
        first_step=step,
        first_sample=consumed_samples,
    )
    if not phases:
        return RunLength(step, consumed_samples, consumed_samples)
    return RunLength.of(phases)
