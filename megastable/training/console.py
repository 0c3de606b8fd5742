"""Shows a person how a run goes: by a progress bar on a terminal, by plain lines elsewhere."""

from __future__ import annotations

import sys
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from megastable.core.errors import shown
from megastable.core.records import Event
from megastable.monitors.numbers import reason_of_skip
from megastable.training.metrics import StepMetrics

QUIET_EVENTS = ("overflow", "skip", "resume", "changed", "passed_over")
"""Kinds of events that show in the line of the step itself, or have been printed when the run started."""


class StepDisplay(Protocol):
    """Shows steps and events of a run as they come."""

    def show(self, metrics: StepMetrics) -> None:
        """Show one step."""
        ...

    def show_event(self, event: Event) -> None:
        """Show an event."""
        ...

    def note(self, text: str) -> None:
        """Show a line of text between steps."""
        ...

    def close(self) -> None:
        """Leave the terminal as it was found."""
        ...


class PlainLines:
    """Prints a line every ``interval`` steps, at the first and the last, and where a step was skipped or evaluated."""

    def __init__(self, total_steps: int, interval: int) -> None:
        self._total_steps = total_steps
        self._interval = interval
        self._is_first = True

    def show(self, metrics: StepMetrics) -> None:
        """Print the step where it is due."""
        is_due = metrics.step % self._interval == 0 or metrics.step == self._total_steps or self._is_first
        self._is_first = False
        if is_due or metrics.skipped or metrics.eval_loss is not None:
            # Flushed, as every line here: a launcher reads through a pipe, which would hold back the last few kB.
            print(f"step {metrics.step}/{self._total_steps} | {summary(metrics)}", flush=True)

    def show_event(self, event: Event) -> None:
        """Print a line, unless the line of the step says the same."""
        if event.kind not in QUIET_EVENTS:
            print(shown(f"step {event.step} {event.kind}: {event.text}", keep="\n"), flush=True)

    def note(self, text: str) -> None:
        """Print a line."""
        print(shown(text, keep="\n"), flush=True)

    def close(self) -> None:
        """Leave the output as it is: every line is complete."""


class ProgressBar:
    """Draws a bar with the time left and the newest step below it; evaluations and events stay above for good."""

    def __init__(self, total_samples: int, consumed_samples: int) -> None:
        # In samples, not steps: under a ramp the later steps take longer, and the time left has to know.
        self._progress = Progress(
            TextColumn("[bold]samples"), BarColumn(), MofNCompleteColumn(), TextColumn("left"), TimeRemainingColumn()
        )
        self._task = self._progress.add_task("", total=total_samples, completed=consumed_samples)
        self._live = Live(self._progress, console=Console(highlight=False))
        self._live.start()
        self._headroom = ""
        self._last_event = ""

    def show(self, metrics: StepMetrics) -> None:
        """Move the bar, and keep a line of a step that was skipped or evaluated."""
        text = f"step {metrics.step} | {summary(metrics)}"
        self._progress.update(self._task, completed=metrics.consumed_samples)
        # Only watched steps measure the headroom; between them the line of the last one stays.
        if metrics.headroom is not None:
            self._headroom = f"headroom used {metrics.headroom:.1%} in {metrics.headroom_layer}"
        # Text, not markup: a path with brackets would be read as a style.
        below = [Text(line) for line in (text, self._headroom, self._last_event) if line]
        self._live.update(Group(self._progress, *below))
        if metrics.skipped or metrics.eval_loss is not None:
            self._live.console.print(Text(text))

    def show_event(self, event: Event) -> None:
        """Show the newest event below the bar, and above it those that no line of a step shows."""
        self._last_event = shown(f"last event: {event.kind} at step {event.step}: {event.text}")
        if event.kind not in QUIET_EVENTS:
            self._live.console.print(Text(shown(f"step {event.step} {event.kind}: {event.text}", keep="\n")))

    def note(self, text: str) -> None:
        """Print a line above the bar."""
        self._live.console.print(Text(shown(text, keep="\n")))

    def close(self) -> None:
        """Stop redrawing."""
        self._live.stop()


def make_display(total_steps: int, total_samples: int, consumed_samples: int, interval: int) -> StepDisplay:
    """Choose the display that suits standard output."""
    if sys.stdout.isatty():
        return ProgressBar(total_samples, consumed_samples)
    return PlainLines(total_steps, interval)


def summary(metrics: StepMetrics) -> str:
    """Sum up one step in a line."""
    parts = [f"loss {metrics.loss:.4f}", f"grad norm {metrics.grad_norm:.3f}"]
    if metrics.loss_scale != 1.0:
        parts.append(f"scale {metrics.loss_scale:g}")
    parts += [
        f"batch {metrics.global_batch_size}",
        f"lr {metrics.lr:.2e}",
        f"{metrics.tokens_per_second:,.0f} tokens/s",
        f"{metrics.tflops_per_device:.3g} TFLOPs",
    ]
    if metrics.vetoed:
        parts.append("SKIPPED: it stands out")
    elif metrics.skipped:
        parts.append(f"SKIPPED: {reason_of_skip(metrics.grad_norm)}")
    if metrics.eval_loss is not None:
        parts.append(f"eval loss {metrics.eval_loss:.4f}")
    return " | ".join(parts)
