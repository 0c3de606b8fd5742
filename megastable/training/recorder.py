"""Writes every step's metrics to all sinks; only rank 0 has a recorder that does anything."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from megastable.core.records import Event
from megastable.training.console import StepDisplay
from megastable.training.metrics import StepMetrics, finite_or_none
from megastable.training.output import lasting_file, report_on_stderr


class Writers(Protocol):
    """Describes DeepSpeed's monitor: TensorBoard, W&B, Comet and CSV, whichever the run file enables."""

    enabled: bool

    def write_events(self, event_list: list[tuple[str, Any, int]]) -> None:
        """Write (name, value, consumed samples) triples."""
        ...


class Recorder:
    """Feeds metrics.jsonl, events.jsonl, the writers and the display from the same values.

    Nothing of this ends a run: what cannot be written is reported once on standard error.

    Raises:
        OSError: one of the two files cannot be opened; only here.
    """

    def __init__(self, metrics_file: Path, events_file: Path, writers: Writers, display: StepDisplay) -> None:
        self._metrics = lasting_file(metrics_file)
        self._events = lasting_file(events_file)
        self._writers = writers
        self._writers_failed = False
        self._display = display

    def record(self, metrics: StepMetrics) -> None:
        """Write one step everywhere."""
        # Unbuffered: a killed run keeps every step that it finished, and `megastable watch` sees it at once.
        self._metrics.write(f"{metrics.to_json()}\n".encode())
        if self._writers.enabled:
            self._feed_writers(metrics)
        self._display.show(metrics)

    def record_event(self, event: Event) -> None:
        """Write an event, and show it."""
        self._events.write(f"{json.dumps(finite_or_none(asdict(event)))}\n".encode())
        self._display.show_event(event)

    def note(self, text: str) -> None:
        """Show a line of text."""
        self._display.note(text)

    def _feed_writers(self, metrics: StepMetrics) -> None:
        numbers = metrics.numbers()
        del numbers["consumed_samples"]  # the writers' axis
        triples = [(f"Train/{name}", value, metrics.consumed_samples) for name, value in numbers.items()]
        try:
            self._writers.write_events(triples)
        except Exception as error:  # of any package behind a writer: a full disk, a service that does not answer
            if not self._writers_failed:
                report_on_stderr(f"a writer of DeepSpeed's failed ({type(error).__name__}: {error}); the run goes on")
            self._writers_failed = True

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._metrics.close()
        self._events.close()
        self._display.close()


class SilentRecorder:
    """Takes the recorder's place on all other ranks, which have the same values, and does nothing."""

    def record(self, metrics: StepMetrics) -> None:
        """Leave the step to rank 0."""

    def record_event(self, event: Event) -> None:
        """Leave the event to rank 0."""

    def note(self, text: str) -> None:
        """Leave the line to rank 0."""

    def __enter__(self) -> SilentRecorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None
