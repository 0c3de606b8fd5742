"""What a person sees of a run: a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from megastable.core.records import Event
from megastable.training.metrics import StepMetrics

QUIET_EVENTS = ("overflow", "skip")
"""Kinds that show in the line of the step itself."""


class StepDisplay(Protocol):
    """Shows steps as they come."""

    def show(self, metrics: StepMetrics) -> None:
        """Show one step."""
        ...

    def happened(self, event: Event) -> None:
        """Show an event."""
        ...

    def note(self, text: str) -> None:
        """Show a line of text between steps."""
        ...

    def close(self) -> None:
        """Leave the terminal as it was found."""
        ...


class PlainLines:
    """A line every ``interval`` steps, at the first and the last, and where something happened."""

    def __init__(self, total_steps: int, interval: int) -> None:
        self._total_steps, self._interval = total_steps, interval
        self._seconds_per_sample: float | None = None
        self._first = True

    def show(self, metrics: StepMetrics) -> None:
        """Print the step where it is due."""
        due = metrics.step % self._interval == 0 or metrics.step == self._total_steps or self._first
        self._first = False
        if due or metrics.skipped or metrics.eval_loss is not None:
            print(f"step {metrics.step}/{self._total_steps} | {summary(metrics)}", flush=True)

    def happened(self, event: Event) -> None:
        """Print a line, but for what the lines of steps say anyway."""
        if event.kind not in QUIET_EVENTS:
            print(f"step {event.step} {event.kind}: {event.text}", flush=True)

    def note(self, text: str) -> None:
        """Print a line."""
        print(text, flush=True)

    def close(self) -> None:
        """Nothing to do."""


class ProgressBar:
    """A bar with the time left, and the newest step in the line below it; evaluations stay above."""

    def __init__(self, total_samples: int, consumed_samples: int) -> None:
        # In samples, not steps: under a ramp the later steps take longer, and the time left has to know.
        self._progress = Progress(
            TextColumn("[bold]samples"), BarColumn(), MofNCompleteColumn(), TextColumn("left"), TimeRemainingColumn()
        )
        self._task = self._progress.add_task("", total=total_samples, completed=consumed_samples)
        self._live = Live(self._progress, console=Console(highlight=False))
        self._live.start()
        self._last_event = self._headroom = ""

    def show(self, metrics: StepMetrics) -> None:
        """Move the bar."""
        text = f"step {metrics.step} | {summary(metrics)}"
        self._progress.update(self._task, completed=metrics.consumed_samples)
        if metrics.headroom is not None:
            self._headroom = f"headroom used {metrics.headroom:.1%} in {metrics.headroom_layer}"
        below = [line for line in (text, self._headroom, self._last_event) if line]
        self._live.update(Group(self._progress, *map(Text, below)))
        if metrics.skipped or metrics.eval_loss is not None:
            self._live.console.print(Text(text))

    def happened(self, event: Event) -> None:
        """Keep the newest below the bar, and warnings above it for good."""
        self._last_event = f"last event: {event.kind} at step {event.step}: {event.text}"
        if event.kind not in QUIET_EVENTS:
            self._live.console.print(Text(f"step {event.step} {event.kind}: {event.text}"))

    def note(self, text: str) -> None:
        """Print a line above the bar."""
        self._live.console.print(Text(text))

    def close(self) -> None:
        """Stop redrawing."""
        self._live.stop()


def make_display(total_steps: int, total_samples: int, consumed_samples: int, interval: int) -> StepDisplay:
    """The display that suits standard output."""
    if sys.stdout.isatty():
        return ProgressBar(total_samples, consumed_samples)
    return PlainLines(total_steps, interval)


def summary(metrics: StepMetrics) -> str:
    """One step in a line."""
    parts = [
        f"loss {metrics.loss:.4f}",
        f"grad norm {metrics.grad_norm:.3f}",
        f"batch {metrics.global_batch_size}",
        f"lr {metrics.lr:.2e}",
        f"{metrics.tokens_per_second:,.0f} tokens/s",
        f"{metrics.tflops_per_device:.3g} TFLOPs",
    ]
    if metrics.loss_scale != 1.0:
        parts.insert(2, f"scale {metrics.loss_scale:g}")
    if metrics.skipped:
        parts.append("SKIPPED: a gradient was not finite")
    if metrics.eval_loss is not None:
        parts.append(f"eval loss {metrics.eval_loss:.4f}")
    return " | ".join(parts)
