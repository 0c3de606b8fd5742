"""A sweep over batches as a table.

Pictures of a sweep over batches: speed and step time over the global batch, as PNG and as a page of its own.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from megastable.cli.cells import ABSENT, percent, significant, whole
from megastable.cli.plan import make_table, wide_console
from megastable.cli.plot import empty_figure, make_plain, save_figure
from megastable.core.batch_rampup import Batch
from megastable.core.errors import UserError
from megastable.core.flops import tflops_per_device
from megastable.planning.calibration import Calibration, check_new
from megastable.planning.sweep import SweepReport
from megastable.planning.throughput import SweepRow, Work, errors_of

LEAST_WIDTH = 170
COLUMNS = ("batch", "micro-batches", "a step, s", "min", "max", "steps", "tokens/s", "TFLOPs", "hardware", "bubble",
           "limit", "of limit", "predicted, s", "error")  # fmt: skip
CAPTION = """TFLOPs: model operations, per device; hardware: with recomputation and padding; limit: m/(m+p-1)"""
MEASURED_CAPTION = """of limit: measured speed over the limit times the fitted speed without bubble and fixed cost
predicted: from the steps marked *, which it has seen"""


def show_sweep(report: SweepReport, name: str) -> None:
    """Print a row for every batch, the recommended start, and how good the prediction was."""
    console = wide_console(LEAST_WIDTH)
    table = make_table(name, *COLUMNS)
    for row in report.rows:
        table.add_row(*_cells(row))
    table.caption = f"{CAPTION}\n{MEASURED_CAPTION}" if _is_measured(report) else CAPTION
    console.print(table)
    for line in conclusions(report):
        console.print(line)


def conclusions(report: SweepReport) -> list[str]:
    """What follows from the rows, a line each."""
    measured = _is_measured(report)
    lines = [f"recommended start of a ramp: {_recommendation(report.recommended, report.share, measured)}"]
    if measured:
        error = report.median_unseen_error
        seen = ", ".join(str(row.global_batch_size) for row in report.rows if row.calibrated_on)
        told = "unknown, every batch was calibrated on" if error is None else percent(error)
        lines.append(f"median error of the prediction on batches that it has not seen: {told} (calibrated on {seen})")
    return lines


def _is_measured(report: SweepReport) -> bool:
    return report.rows[0].step_seconds is not None


def _recommendation(start: Batch | None, share: float, measured: bool) -> str:
    if start is None:
        return "unknown; name a --device or a --calibration, or measure"
    return (
        f"global batch {start.global_batch_size} ({start.num_microbatches} micro-batches of {start.micro_batch_size}), "
        f"the smallest that reaches {share:.0%} of the top {'measured' if measured else 'predicted'} speed"
    )


def _cells(row: SweepRow) -> list[str]:
    took = row.step_seconds
    predicted = "" if row.predicted_step_seconds is None else significant(row.predicted_step_seconds)
    return [
        whole(row.global_batch_size),
        f"{row.num_microbatches} of {row.micro_batch_size}",
        *(_or_dash(value, significant) for value in ((took.median, took.least, took.most) if took else (None,) * 3)),
        _or_dash(took.num_steps if took else None, whole),
        _or_dash(row.tokens_per_second, whole),
        _or_dash(row.tflops_per_device, significant),
        _or_dash(row.hardware_tflops_per_device, significant),
        percent(row.bubble),
        percent(row.limit),
        _or_dash(row.share_of_limit, percent),
        f"{predicted or ABSENT}{' *' if row.calibrated_on else ''}",
        _or_dash(row.error, "{:+.1%}".format),
    ]


def _or_dash(value: float | None, form: Callable[[float], str]) -> str:
    return ABSENT if value is None else form(value)


def comparison(report: SweepReport, other: Calibration) -> str:
    """How well a calibration from elsewhere predicts what was measured here."""
    errors = errors_of(other.cost, report.rows)
    median = statistics.median(map(abs, errors))
    return (
        f"median error of {other.source}: {percent(median)} over all {len(errors)} batches "
        f"({min(errors):+.1%} to {max(errors):+.1%})"
    )


COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#8c564b", "#ff7f0e")
"""Of the micro-batch sizes."""
SPEED, SECONDS = "model TFLOPs per device", "seconds a step"


@dataclass(frozen=True)
class Curve:
    """One micro-batch size: a point for every global batch. ``least`` and ``most`` are those of the measured steps."""

    micro_batch_size: int
    global_batch_sizes: list[int]
    measured: list[float]
    least: list[float]
    most: list[float]
    predicted: list[float]
    seen: list[bool]
    """The prediction was calibrated on the point."""


def plot_paths(prefix: Path) -> tuple[Path, Path]:
    """The two files that a prefix stands for."""
    return prefix.with_name(f"{prefix.name}.png"), prefix.with_name(f"{prefix.name}.html")


def check_can_plot(prefix: Path) -> None:
    """Refuse before anything is measured.

    Raises:
        UserError: a package is missing, or a file is there already.
    """
    for path in plot_paths(prefix):
        check_new(path)
    empty_figure()
    _plotly()


def plot_sweep(rows: list[SweepRow], work: Work, prefix: Path, title: str) -> None:
    """Draw measured rows into ``prefix``.png and ``prefix``.html.

    Raises:
        UserError: matplotlib or plotly is not installed, or a file cannot be written.
    """
    panels = {SPEED: list(curves(rows, work, SPEED)), SECONDS: list(curves(rows, work, SECONDS))}
    picture, page = plot_paths(prefix)
    _draw_picture(panels, picture, title)
    _draw_page(panels, page, title)


def curves(rows: list[SweepRow], work: Work, quantity: str) -> Iterator[Curve]:
    """A curve for every micro-batch size, of seconds or of the speed that follows from them."""

    def value(row: SweepRow, seconds: float) -> float:
        if quantity == SECONDS:
            return seconds
        return tflops_per_device(work.model_flops_per_sample, row.global_batch_size, seconds, work.num_devices)

    measured = [(row, row.step_seconds, row.predicted_step_seconds) for row in rows]
    for size, group in groupby(measured, key=lambda entry: entry[0].micro_batch_size):
        points = [(row, took, predicted) for row, took, predicted in group if took and predicted]
        ends = [sorted((value(row, took.least), value(row, took.most))) for row, took, _ in points]
        yield Curve(
            micro_batch_size=size,
            global_batch_sizes=[row.global_batch_size for row, _, _ in points],
            measured=[value(row, took.median) for row, took, _ in points],
            least=[least for least, _ in ends],
            most=[most for _, most in ends],
            predicted=[value(row, predicted) for row, _, predicted in points],
            seen=[row.calibrated_on for row, _, _ in points],
        )


def _draw_picture(panels: dict[str, list[Curve]], output: Path, title: str) -> None:
    figure = empty_figure()
    figure.suptitle(title, fontsize=10)
    for axes, (quantity, drawn) in zip(figure.subplots(len(panels), 1, sharex=True), panels.items(), strict=True):
        for curve, color in zip(drawn, _colors(drawn), strict=True):
            below, above = _errors(curve)
            x = curve.global_batch_sizes
            label = f"micro-batches of {curve.micro_batch_size}"
            axes.errorbar(
                x, curve.measured, (below, above), fmt="o", color=color, capsize=3, label=f"{label}, measured"
            )
            axes.plot(x, curve.predicted, "--", color=color, linewidth=1, label=f"{label}, predicted")
            unseen = [index for index, seen in enumerate(curve.seen) if not seen]
            axes.plot(
                [x[index] for index in unseen], [curve.predicted[index] for index in unseen], "x", color=color,
                label="not calibrated on",
            )  # fmt: skip
        axes.set_ylabel(quantity)
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_formatter("{x:g}")
        make_plain(axes)
    figure.axes[0].legend(frameon=False, fontsize=8)
    figure.axes[-1].set_xlabel("global batch (samples)")
    save_figure(figure, output)


def _draw_page(panels: dict[str, list[Curve]], output: Path, title: str) -> None:
    """A page that needs no network: plotly's own code is written into it."""
    plotly = _plotly()
    figure = plotly.subplots.make_subplots(rows=len(panels), cols=1, shared_xaxes=True)
    for row, (quantity, drawn) in enumerate(panels.items(), start=1):
        for curve, color in zip(drawn, _colors(drawn), strict=True):
            below, above = _errors(curve)
            label = f"micro-batches of {curve.micro_batch_size}"
            common = {"x": curve.global_batch_sizes, "showlegend": row == 1}
            error = {"type": "data", "symmetric": False, "array": above, "arrayminus": below}
            figure.add_scatter(
                **common, y=curve.measured, error_y=error, mode="markers", name=f"{label}, measured",
                marker={"color": color}, row=row, col=1,
            )  # fmt: skip
            symbols = ["circle-open" if seen else "x" for seen in curve.seen]
            figure.add_scatter(
                **common, y=curve.predicted, mode="lines+markers", name=f"{label}, predicted (x: not calibrated on)",
                line={"color": color, "dash": "dash", "width": 1}, marker={"symbol": symbols}, row=row, col=1,
            )  # fmt: skip
        figure.update_yaxes(title=quantity, rangemode="tozero", row=row, col=1)
    sizes = sorted({size for drawn in panels.values() for curve in drawn for size in curve.global_batch_sizes})
    figure.update_xaxes(type="log", tickvals=sizes)
    figure.update_xaxes(title="global batch (samples)", row=len(panels), col=1)
    figure.update_layout(title=title, template="simple_white")
    try:
        figure.write_html(output, include_plotlyjs=True)
    except OSError as error:
        raise UserError(f"{output}: {error}") from error


def _errors(curve: Curve) -> tuple[list[float], list[float]]:
    """How far the steps reach below and above their median."""
    below = [middle - least for middle, least in zip(curve.measured, curve.least, strict=True)]
    above = [most - middle for middle, most in zip(curve.measured, curve.most, strict=True)]
    return below, above


def _colors(drawn: list[Curve]) -> list[str]:
    return [COLORS[number % len(COLORS)] for number in range(len(drawn))]


def _plotly() -> Any:
    try:
        import plotly.subplots
    except ImportError as error:
        raise UserError("pages need plotly: pip install 'megastable[plot]'") from error
    return plotly
