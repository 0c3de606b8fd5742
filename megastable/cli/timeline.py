"""Timelines of a step as a page that needs nothing else, or as a trace that Chrome and Perfetto open."""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megastable.cli.tables import duration, percent
from megastable.core.errors import UserError
from megastable.core.pipeline_schedule import PassKind
from megastable.core.schedule_simulation import PlayedPass, Timeline, most_held
from megastable.planning.timelines import PlannedTimelines

STYLE = Path(__file__).parent / "timeline.css"
WIDTH, ROW, GAP, MARGIN = 1200, 22, 3, 34
"""Of a drawing, in its own units: all of it, a rank's row, between two rows, and left of them."""
LEAST_NAMED_WIDTH = 11
"""Of a slot that has room for the number of its micro-batch."""
NAMES = {
    PassKind.FORWARD: "forward",
    PassKind.INPUT_BACKWARD: "input gradients",
    PassKind.WEIGHT_BACKWARD: "weight gradients",
    PassKind.BACKWARD: "backward, whole",
}


def write_timelines(planned: PlannedTimelines, name: str, output: Path) -> None:
    """Write the page or the trace, by the suffix.

    Raises:
        UserError: the file cannot be written.
    """
    try:
        output.write_text(FORMATS[output.suffix](planned, name), encoding="utf-8")
    except OSError as error:
        raise UserError(f"--timeline {output}: {error.strerror}") from error


def check_timeline_suffix(output: Path) -> None:
    """Check that the suffix says what is to be written.

    Raises:
        UserError: it does not.
    """
    if output.suffix not in FORMATS:
        raise UserError(f"--timeline {output}: must end in {' or '.join(FORMATS)}")


# The trace


def trace(planned: PlannedTimelines, name: str) -> str:
    """Return the events that Chrome's tracing and Perfetto draw: a process a shape, a thread a rank, microseconds."""
    events: list[dict[str, Any]] = []
    for process, timeline in enumerate(planned.timelines):
        events.append(_named("process_name", process, 0, timeline.schedule.shape))
        for rank in range(timeline.schedule.placement.num_ranks):
            events.append(_named("thread_name", process, rank, f"rank {rank}"))
        events += (_event(played, process) for played in timeline.passes)
    other = {
        "run_file": name,
        "unit": "seconds" if planned.in_seconds else "a second is a step of 1F1B",
        "assumptions": planned.assumptions,
    }
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": other})


def _named(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


def _event(played: PlayedPass, process: int) -> dict[str, Any]:
    kind, chunk, micro_batch = played.work
    return {
        "name": f"{NAMES[kind]} {micro_batch}",
        "cat": kind.value,
        "ph": "X",
        "ts": played.start * 1e6,
        "dur": (played.end - played.start) * 1e6,
        "pid": process,
        "tid": played.rank,
        "args": {"micro_batch": micro_batch, "chunk": chunk},
    }


# The page


def page(planned: PlannedTimelines, name: str) -> str:
    """Return a page with every shape's slots below each other, all on one scale of time."""
    longest = max(timeline.step_seconds for timeline in planned.timelines)
    ranks = planned.timelines[0].schedule.placement.num_ranks
    batch = planned.batch
    title = html.escape(f"{name}: a step of {batch.num_microbatches} micro-batches on {ranks} ranks")
    kinds = "".join(
        f'<li><svg viewBox="0 0 12 12"><rect class="{kind}" width="12" height="12"/></svg>{words}</li>'
        for kind, words in NAMES.items()
    )
    assumptions = "".join(f"<li>{html.escape(line)}</li>" for line in planned.assumptions)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{STYLE.read_text(encoding='utf-8')}</style></head><body><h1>{title}</h1>"
        f'<ul class="kinds">{kinds}<li>darker: a rank\'s second chunk of layers</li></ul>'
        + "".join(_figure(timeline, planned, longest) for timeline in planned.timelines)
        + f'<h2>Assumed</h2><ul class="assumed">{assumptions}</ul></body></html>\n'
    )


def _figure(timeline: Timeline, planned: PlannedTimelines, longest: float) -> str:
    schedule = timeline.schedule
    first = planned.timelines[0]
    share = timeline.step_seconds / first.step_seconds
    held = [most_held(order) for order in schedule.orders]
    took = f"{duration(timeline.step_seconds)}, " if planned.in_seconds else ""
    chunks = "halves of a stage" if schedule.placement.num_chunks == 2 else "stages"
    words = (
        f"{took}{share:.2f} of {first.schedule.shape}; idle {percent(timeline.idle_share)}; a rank holds at most "
        f"{max(one.activations for one in held)} activations and {max(one.deferred for one in held)} deferred "
        f"gradients, of {chunks}"
    )
    height = schedule.placement.num_ranks * (ROW + GAP)
    slots = "".join(_slots(timeline, (WIDTH - MARGIN) / longest))
    name = html.escape(schedule.shape)
    return (
        f"<figure><figcaption><b>{name}</b> {html.escape(words)}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{name}">{slots}</svg></figure>'
    )


def _slots(timeline: Timeline, scale: float) -> Iterator[str]:
    for rank, row in enumerate(timeline.by_rank):
        top = rank * (ROW + GAP)
        yield f'<text class="rank" x="{MARGIN - 6}" y="{top + ROW - 6}">{rank}</text>'
        yield (
            f'<rect class="idle" x="{MARGIN}" y="{top}" width="{timeline.step_seconds * scale:.2f}" height="{ROW}"/>'
        )
        for played in row:
            kind, chunk, micro_batch = played.work
            left = MARGIN + played.start * scale
            width = (played.end - played.start) * scale
            late = " late" if chunk else ""
            tip = f"{NAMES[kind]}, micro-batch {micro_batch}, chunk {chunk}, rank {rank}"
            yield (
                f'<g><title>{tip}</title><rect class="{kind}{late}" x="{left:.2f}" y="{top}" width="{width:.2f}" '
                f'height="{ROW}"/>'
            )
            if width >= LEAST_NAMED_WIDTH:
                yield f'<text x="{left + width / 2:.2f}" y="{top + ROW - 7}">{micro_batch}</text>'
            yield "</g>"


FORMATS: dict[str, Callable[[PlannedTimelines, str], str]] = {".html": page, ".json": trace}
