"""The fields of the dashboard: what a run's newest step, and what is watched beside it, say in a line each."""

from __future__ import annotations

from collections.abc import Callable

from rich.text import Text

from megastable.cli.cells import ABSENT, cell, duration, percent, significant, whole
from megastable.cli.layer_table import layers_of
from megastable.cli.run_files import RunState, number

Field = tuple[str, Callable[[RunState], Text]]
"""A label, and the text beside it."""
RECENT_STEPS = 200
"""Over which skipped steps are counted and curves are drawn."""
HEADROOM_KEYS = {"max_activation": "activation", "max_attention_logit": "attention logit"}
"""Values of a layer whose share of the number format's maximum is watched."""


def number_format(state: RunState) -> str:
    """The format in which the run computes."""
    return state.run.number_format if state.run else "the number format"


def _batch(state: RunState) -> Text:
    row, layout = state.newest, state.layout
    replicas = f" x {layout.data_parallel_size} replicas" if layout else ""
    return Text.assemble(
        cell(row, "global_batch_size", whole), " = ", cell(row, "num_microbatches", whole), " micro-batches of ",
        cell(row, "micro_batch_size", whole), replicas,
    )  # fmt: skip


def _loss(state: RunState) -> Text:
    text = cell(state.newest, "loss", "{:.4f}".format)
    if number(state.newest, "loss_volatility") is not None:
        text.append_text(Text.assemble(", volatility ", cell(state.newest, "loss_volatility")))
    return text


def _clipping(state: RunState) -> Text:
    if number(state.newest, "clip_coefficient") == 1.0:
        return Text("1 (not clipped)")
    return cell(state.newest, "clip_coefficient")


def _skips(state: RunState) -> Text:
    recent = state.recent(RECENT_STEPS)
    count = sum(row.get("skipped") is True for row in recent)
    this = Text("this step", style="bold red") if state.newest.get("skipped") is True else Text("no")
    return Text.assemble(this, f"; {count} of the last {len(recent)} steps", style="" if count == 0 else "yellow")


def _speed(state: RunState) -> Text:
    seconds = state.step_seconds
    a_step = "" if seconds is None else f", {duration(seconds)} a step"
    return Text.assemble(cell(state.newest, "tokens_per_second", whole), " tokens/s", a_step)


def _tflops(state: RunState) -> Text:
    hardware = cell(state.newest, "hardware_tflops_per_device")
    return Text.assemble(cell(state.newest, "tflops_per_device"), " a device, ", hardware, " executed")


def _headroom(state: RunState) -> Text:
    row = state.newest_with("headroom")
    text = cell(row, "headroom", percent)
    share = number(row, "headroom")
    if share is None:
        return text
    warned_from = state.run.megastable.monitors.headroom_warning if state.run else 1.0
    if share >= warned_from:
        text.stylize("bold red")
    values = [
        (value, f"{name} {significant(value)} in {layer}")
        for layer, of_layer in layers_of(row).items()
        for key, name in HEADROOM_KEYS.items()
        if (value := number(of_layer, key)) is not None
    ]
    largest = f": {max(values)[1]}" if values else ""
    return text.append(f" of {number_format(state)}'s maximum{largest}")


def _slowest(state: RunState) -> Text:
    row = state.newest_with("slowest_rank", "slowest_rank_share")
    rank, share = number(row, "slowest_rank"), number(row, "slowest_rank_share")
    if rank is None:
        return cell(row, "slowest_rank")
    name = state.layout.describe(int(rank)) if state.layout else f"rank {rank:.0f}"
    return Text(name if share is None else f"{name}, busy {percent(share)} of the step")


def _memory(state: RunState) -> Text:
    row = state.newest_with("host_memory_gib")
    parts = [
        f"{name} {number(row, key):.1f} GiB"
        for name, key in (("host", "host_memory_gib"), ("device", "device_memory_gib"))
        if number(row, key) is not None
    ]
    return Text(", ".join(parts) or ABSENT)


def _validation(state: RunState) -> Text:
    row = state.newest_with("eval_loss")
    text = cell(row, "eval_loss", "{:.4f}".format)
    return text.append_text(Text.assemble(" at step ", cell(row, "step", whole))) if row else text


STEP_FIELDS: tuple[Field, ...] = (
    ("loss", _loss),
    ("gradient norm", lambda state: cell(state.newest, "grad_norm").append(" before clipping")),
    ("clip coefficient", _clipping),
    ("learning rate", lambda state: cell(state.newest, "lr")),
    ("loss scale", lambda state: cell(state.newest, "loss_scale")),
    ("skipped", _skips),
    ("batch", _batch),
    ("speed", _speed),
    ("TFLOPs", _tflops),
)
WATCHED_FIELDS: tuple[Field, ...] = (
    ("validation loss", _validation),
    ("headroom", _headroom),
    ("slowest rank", _slowest),
    ("memory", _memory),
)
