"""Writes every step's metrics to all sinks; only rank 0 has a recorder that does anything."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from megastable.core.records import Event, TrainingState
from megastable.engine.writers import rewind_writers
from megastable.training.console import StepDisplay
from megastable.training.metrics import StepMetrics, finite_or_none
from megastable.training.output import LastingFile, report_on_stderr
from megastable.training.run_folder import RunFolder
from megastable.training.run_lock import RunLock, Standing


class Writers(Protocol):
    """Describes DeepSpeed's monitor: TensorBoard, W&B, Comet and CSV, whichever the run file enables."""

    enabled: bool

    def write_events(self, event_list: list[tuple[str, Any, int]]) -> None:
        """Write (name, value, consumed samples) triples."""
        ...


class Recorder:
    """Feeds metrics.jsonl, events.jsonl, the writers and the display from the same values.

    Nothing of this ends a run: what cannot be written is reported once on standard error.

    Args:
        lock: the lock of the run folder.
        write_config: writes ``config.json`` anew where it was removed.

    Raises:
        OSError: one of the two files cannot be opened; only here.
    """

    def __init__(
        self, folder: RunFolder, lock: RunLock, write_config: Callable[[], None], writers: Writers, display: StepDisplay
    ) -> None:
        self._folder = folder
        self._lock = lock
        self._write_config = write_config
        self._metrics = LastingFile(folder.metrics)
        self._events = LastingFile(folder.events)
        self._writers = writers
        self._writers_failed = False
        self._display = display

    def look_after_folder(self, state: TrainingState) -> str | None:
        """Begin anew what was removed under the run, with an event; called before the lines of every step.

        Returns:
            Why the run has to stop: another one has taken the folder over, in which this one writes no more. Else None.
        """
        removed = [file for file in (self._metrics, self._events) if file.was_removed()]
        for file in removed:
            file.reopen()
        names = [file.path.name for file in removed]
        try:
            standing = self._lock.keep()
            if standing is Standing.TAKEN:
                self._metrics.drop_kept()
                self._events.drop_kept()
                return self._lock.describe_loss()
            if not self._folder.config.exists():
                self._write_config()
                names.append(self._folder.config.name)
        except OSError:
            # The folder cannot be made again. The files report that, keep their lines, and this is tried at every step.
            return None
        if standing is Standing.REMOVED:
            names.append(self._folder.lock.name)
        if names:
            text = f"removed under the run in {self._folder.path}, and begun anew: {', '.join(names)}"
            self.record_event(Event(state.step, state.consumed_samples, "files_lost", text, {"files": names}))
        return None

    def take_switch(self, switch: Path) -> bool:
        """Tell whether somebody has put the file ``switch`` into the run folder, and remove it."""
        try:
            switch.unlink()
        except OSError:  # as a rule there is none; one that cannot be removed would be obeyed at every step
            return False
        return True

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

    def go_back(self, state: TrainingState) -> None:
        """Move the lines of the steps after ``state``, which come once more, to where a resume moves them."""
        for file in (self._metrics, self._events):
            # What a full disk has kept back is, but for the last lines, of the steps that come once more.
            file.drop_kept()
        try:
            unreadable = self._folder.drop_lines_after(state.step)
            rewind_writers(self._writers, state.consumed_samples)
        except Exception as error:  # of a disk, or of any package behind a writer
            unreadable = []
            report_on_stderr(f"lines of later steps stand twice ({error}); the run goes on")
        for file in (self._metrics, self._events):
            file.reopen()
        for text in unreadable:
            self.record_event(Event(state.step, state.consumed_samples, "set_aside", text, {}))

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

    def look_after_folder(self, state: TrainingState) -> str | None:
        """Leave the folder to rank 0."""
        return None

    def take_switch(self, switch: Path) -> bool:
        """Leave the switches to rank 0."""
        return False

    def record(self, metrics: StepMetrics) -> None:
        """Leave the step to rank 0."""

    def record_event(self, event: Event) -> None:
        """Leave the event to rank 0."""

    def go_back(self, state: TrainingState) -> None:
        """Leave the files to rank 0."""

    def note(self, text: str) -> None:
        """Leave the line to rank 0."""

    def __enter__(self) -> SilentRecorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None
