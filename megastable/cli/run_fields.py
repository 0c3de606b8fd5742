"""What the state of a run says in words: whether it goes on, and the fields of the dashboard, a line each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rich.text import Text

from megastable.cli.run_files import Row, RunState, layers_of, number
from megastable.cli.tables import ABSENT, duration, percent, significant, whole

Field = tuple[str, Callable[[RunState], Text]]
"""A label, and the text beside it."""

QUIET_STEP_TIMES = 10
"""A run is quiet after as many step times without a new step, which leaves room to evaluate and to save."""
SHORTEST_QUIET_SECONDS = 10.0
RECENT_STEPS = 200
"""Over which skipped steps are counted and curves are drawn."""
HEADROOM_KEYS = {"max_activation": "activation", "max_attention_logit": "attention logit"}
"""Values of a layer whose share of the number format's maximum is watched."""
MEMORY_KEYS = {"host_memory_gib": "host", "device_memory_gib": "device"}
NOT_FINITE = Text("not finite", style="bold red")


def cell(row: Row, key: str, form: Callable[[float], str] = significant) -> Text:
    """Format the value of a key; a dash where it is absent, and words where it is not finite."""
    if key not in row:
        return Text(ABSENT, style="dim")
    value = number(row, key)
    if value is None:
        return NOT_FINITE.copy()  # a Text can be appended to, so that the constant must not leave this module
    return Text(form(value))


# Whether the run goes on


@dataclass(frozen=True)
class Status:
    """A sentence on the run, and the style in which it is shown."""

    text: str
    style: str


def status_of(state: RunState, now_unix: float) -> Status:
    """Tell whether the run waits, has finished, was stopped, is quiet or goes on, and the age of its newest step."""
    if not state.steps or state.newest_step_unix is None:
        return Status("waiting for the first step", "bold yellow")
    # The clock of the machine that writes may be ahead.
    age_seconds = max(0.0, now_unix - state.newest_step_unix)
    newest = f"newest step {duration(age_seconds)} ago"
    step = number(state.newest, "step")
    # A run that has ended takes no more steps either, so that this is asked before the age of the newest one.
    if state.length is not None and step is not None and step >= state.length.total_steps:
        return Status(f"finished, {newest}", "bold green")
    if _has_stopped(state):
        return Status(f"stopped, {newest}", "bold red")
    step_seconds = state.step_seconds or 0.0
    if age_seconds > max(SHORTEST_QUIET_SECONDS, QUIET_STEP_TIMES * step_seconds):
        return Status(f"QUIET: {newest}; a step usually takes {duration(step_seconds)}", "bold red")
    return Status(f"running, {newest}", "bold green")


def _has_stopped(state: RunState) -> bool:
    """Tell whether the last event is a stop that no step came after."""
    if not state.events:
        return False
    last = state.events[-1]
    step = number(state.newest, "step")
    stop_step = number(last, "step")
    # A stop may carry the number of the step that it prevented.
    return last.get("kind") == "stop" and step is not None and stop_step in (step, step + 1)


# The newest step


def _loss(state: RunState) -> Text:
    text = cell(state.newest, "loss", "{:.4f}".format)
    if number(state.newest, "loss_volatility") is not None:
        text.append(", volatility ").append_text(cell(state.newest, "loss_volatility"))
    return text


def _gradient_norm(state: RunState) -> Text:
    return cell(state.newest, "grad_norm").append(" before clipping")


def _clipping(state: RunState) -> Text:
    # The gradient is multiplied by the coefficient, so that 1 leaves it as it is.
    if number(state.newest, "clip_coefficient") == 1.0:
        return Text("1 (not clipped)")
    return cell(state.newest, "clip_coefficient")


def _skips(state: RunState) -> Text:
    recent = state.recent(RECENT_STEPS)
    count = sum(row.get("skipped") is True for row in recent)
    newest = Text("no")
    if state.newest.get("skipped") is True:
        newest = Text("this step", style="bold red")
    style = "yellow" if count > 0 else ""
    return Text.assemble(newest, f"; {count} of the last {len(recent)} steps", style=style)


def _batch(state: RunState) -> Text:
    row = state.newest
    text = Text.assemble(
        cell(row, "global_batch_size", whole), " = ", cell(row, "num_microbatches", whole), " micro-batches of ",
        cell(row, "micro_batch_size", whole),
    )  # fmt: skip
    if state.layout is not None:
        text.append(f" x {state.layout.data_parallel_size} replicas")
    return text


def _speed(state: RunState) -> Text:
    text = Text.assemble(cell(state.newest, "tokens_per_second", whole), " tokens/s")
    if state.step_seconds is not None:
        text.append(f", {duration(state.step_seconds)} a step")
    return text


def _tflops(state: RunState) -> Text:
    hardware = cell(state.newest, "hardware_tflops_per_device")
    return Text.assemble(cell(state.newest, "tflops_per_device"), " a device, ", hardware, " executed")


STEP_FIELDS: tuple[Field, ...] = (
    ("loss", _loss),
    ("gradient norm", _gradient_norm),
    ("clip coefficient", _clipping),
    ("learning rate", lambda state: cell(state.newest, "lr")),
    ("loss scale", lambda state: cell(state.newest, "loss_scale")),
    ("skipped", _skips),
    ("batch", _batch),
    ("speed", _speed),
    ("TFLOPs", _tflops),
)


# What is watched beside it: each of the newest step that has it


def _validation(state: RunState) -> Text:
    row = state.newest_with("eval_loss")
    text = cell(row, "eval_loss", "{:.4f}".format)
    if row:
        text.append(" at step ").append_text(cell(row, "step", whole))
    return text


def _headroom(state: RunState) -> Text:
    row = state.newest_with("headroom")
    text = cell(row, "headroom", percent)
    share = number(row, "headroom")
    if share is None:
        return text
    if share >= _headroom_warning(state):
        text.stylize("bold red")
    # Only the share is colored: what follows is appended after the style.
    text.append(f" of {number_format(state)}'s maximum")
    largest = _largest_value(row)
    if largest is not None:
        text.append(f": {largest}")
    return text


def number_format(state: RunState) -> str:
    """Return the name of the format in which the run computes."""
    if state.run is None:
        return "the number format"
    return state.run.number_format


def _headroom_warning(state: RunState) -> float:
    """Return the share of the maximum from which the run itself warns."""
    if state.run is None:
        return 1.0
    return state.run.megastable.monitors.headroom_warning


def _largest_value(row: Row) -> str | None:
    """Describe the largest value of all layers that the number format has to hold; None where none is known."""
    values = []
    for layer, of_layer in layers_of(row).items():
        for key, name in HEADROOM_KEYS.items():
            value = number(of_layer, key)
            if value is not None:
                values.append((value, f"{name} {significant(value)} in {layer}"))
    if not values:
        return None
    _, largest = max(values)
    return largest


def _slowest(state: RunState) -> Text:
    row = state.newest_with("slowest_rank", "slowest_rank_share")
    rank = number(row, "slowest_rank")
    if rank is None:
        return cell(row, "slowest_rank")
    name = f"rank {rank:.0f}"
    if state.layout is not None:
        name = state.layout.describe(int(rank))
    share = number(row, "slowest_rank_share")
    if share is None:
        return Text(name)
    return Text(f"{name}, busy {percent(share)} of the step")


def _memory(state: RunState) -> Text:
    row = state.newest_with("host_memory_gib")
    parts = []
    for key, name in MEMORY_KEYS.items():
        gib = number(row, key)
        if gib is not None:
            parts.append(f"{name} {gib:.1f} GiB")
    return Text(", ".join(parts) or ABSENT)


WATCHED_FIELDS: tuple[Field, ...] = (
    ("validation loss", _validation),
    ("headroom", _headroom),
    ("slowest rank", _slowest),
    ("memory", _memory),
)
