"""A sweep over global batch sizes as a table, as a picture and as a page that needs no network."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from megastable.cli.pictures import empty_figure, make_plain, save_figure
from megastable.cli.tables import ABSENT, make_table, percent, significant, whole, wide_console
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
COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#8c564b", "#ff7f0e")
"""Of the micro-batch sizes."""
SPEED = "model TFLOPs per device"
SECONDS = "seconds a step"


# The table


def show_sweep(report: SweepReport, name: str) -> None:
    """Print a row for every batch, the recommended start, and how good the prediction was."""
    console = wide_console(LEAST_WIDTH)
    table = make_table(name, *COLUMNS)
    for row in report.rows:
        table.add_row(*_cells(row))
    table.caption = CAPTION
    if _is_measured(report):
        table.caption += f"\n{MEASURED_CAPTION}"
    console.print(table)
    for line in conclusions(report):
        console.print(line)


def conclusions(report: SweepReport) -> list[str]:
    """Say what follows from the rows, a line each."""
    lines = [f"recommended start of a ramp: {_recommendation(report)}"]
    if _is_measured(report):
        seen = ", ".join(str(row.global_batch_size) for row in report.rows if row.calibrated_on)
        median_error = "unknown, every batch was calibrated on"
        if report.median_unseen_error is not None:
            median_error = percent(report.median_unseen_error)
        lines.append(
            f"median error of the prediction on batches that it has not seen: {median_error} (calibrated on {seen})"
        )
    return lines


def comparison(report: SweepReport, other: Calibration) -> str:
    """Say how well a calibration from elsewhere predicts what was measured here."""
    errors = errors_of(other.cost, report.rows)
    median = statistics.median(abs(error) for error in errors)
    return (
        f"median error of {other.source}: {percent(median)} over all {len(errors)} batches "
        f"({min(errors):+.1%} to {max(errors):+.1%})"
    )


def _is_measured(report: SweepReport) -> bool:
    # A sweep measures all of its batches or, in a dry run, none.
    return report.rows[0].step_seconds is not None


def _recommendation(report: SweepReport) -> str:
    start: Batch | None = report.recommended
    if start is None:
        return "unknown; name a --device or a --calibration, or measure"
    known = "measured" if _is_measured(report) else "predicted"
    return (
        f"global batch {start.global_batch_size} ({start.num_microbatches} micro-batches of {start.micro_batch_size}), "
        f"the smallest that reaches {report.share:.0%} of the top {known} speed"
    )


def _cells(row: SweepRow) -> list[str]:
    measured = [ABSENT] * 4
    took = row.step_seconds
    if took is not None:
        measured = [significant(took.median), significant(took.least), significant(took.most), whole(took.num_steps)]
    predicted = _or_absent(row.predicted_step_seconds, significant)
    if row.calibrated_on:
        predicted += " *"
    return [
        whole(row.global_batch_size),
        f"{row.num_microbatches} of {row.micro_batch_size}",
        *measured,
        _or_absent(row.tokens_per_second, whole),
        _or_absent(row.tflops_per_device, significant),
        _or_absent(row.hardware_tflops_per_device, significant),
        percent(row.bubble),
        percent(row.limit),
        _or_absent(row.share_of_limit, percent),
        predicted,
        _or_absent(row.error, "{:+.1%}".format),
    ]


def _or_absent(value: float | None, form: Callable[[float], str]) -> str:
    return ABSENT if value is None else form(value)


# The picture and the page


def plot_paths(prefix: Path) -> tuple[Path, Path]:
    """Return the two files that a prefix stands for: the picture and the page."""
    # Not with_suffix: a prefix such as sweep.v1 would lose its end.
    return prefix.with_name(f"{prefix.name}.png"), prefix.with_name(f"{prefix.name}.html")


def check_can_plot(prefix: Path) -> None:
    """Refuse what could not be drawn, before anything is measured.

    Raises:
        UserError: a package is missing, or a file exists already.
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


@dataclass(frozen=True)
class SizeCurve:
    """One micro-batch size: a point for every global batch. ``least`` and ``most`` are those of the measured steps."""

    micro_batch_size: int
    global_batch_sizes: list[int]
    measured: list[float]
    least: list[float]
    most: list[float]
    predicted: list[float]
    seen: list[bool]
    """The prediction was calibrated on the point."""

    @property
    def below(self) -> list[float]:
        """Return how far the steps reach below their median."""
        return [middle - least for middle, least in zip(self.measured, self.least, strict=True)]

    @property
    def above(self) -> list[float]:
        """Return how far the steps reach above their median."""
        return [most - middle for middle, most in zip(self.measured, self.most, strict=True)]


def curves(rows: list[SweepRow], work: Work, quantity: str) -> Iterator[SizeCurve]:
    """Yield a curve for every micro-batch size, of seconds or of the speed that follows from them."""

    def value(row: SweepRow, seconds: float) -> float:
        """Return the quantity of a step that takes ``seconds``."""
        if quantity == SECONDS:
            return seconds
        return tflops_per_device(work.model_flops_per_sample, row.global_batch_size, seconds, work.num_devices)

    measured = [(row, row.step_seconds, row.predicted_step_seconds) for row in rows]
    for size, group in groupby(measured, key=lambda entry: entry[0].micro_batch_size):
        points = [(row, took, predicted) for row, took, predicted in group if took and predicted]
        # Sorted, because the least seconds are the most speed.
        ends = [sorted((value(row, took.least), value(row, took.most))) for row, took, _ in points]
        yield SizeCurve(
            micro_batch_size=size,
            global_batch_sizes=[row.global_batch_size for row, _, _ in points],
            measured=[value(row, took.median) for row, took, _ in points],
            least=[least for least, _ in ends],
            most=[most for _, most in ends],
            predicted=[value(row, predicted) for row, _, predicted in points],
            seen=[row.calibrated_on for row, _, _ in points],
        )


def _colored(drawn: list[SizeCurve]) -> Iterator[tuple[SizeCurve, str]]:
    """Pair every curve with its color, the same in all panels."""
    for index, curve in enumerate(drawn):
        yield curve, COLORS[index % len(COLORS)]


def _draw_picture(panels: dict[str, list[SizeCurve]], output: Path, title: str) -> None:
    figure = empty_figure()
    figure.suptitle(title, fontsize=10)
    for axes, (quantity, drawn) in zip(figure.subplots(len(panels), 1, sharex=True), panels.items(), strict=True):
        for curve, color in _colored(drawn):
            sizes = curve.global_batch_sizes
            name = f"micro-batches of {curve.micro_batch_size}"
            axes.errorbar(
                sizes, curve.measured, (curve.below, curve.above),
                fmt="o", color=color, capsize=3, label=f"{name}, measured",
            )  # fmt: skip
            axes.plot(sizes, curve.predicted, "--", color=color, linewidth=1, label=f"{name}, predicted")
            unseen = [index for index, seen in enumerate(curve.seen) if not seen]
            axes.plot(
                [sizes[index] for index in unseen], [curve.predicted[index] for index in unseen],
                "x", color=color, label="not calibrated on",
            )  # fmt: skip
        axes.set_ylabel(quantity)
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_formatter("{x:g}")
        make_plain(axes)
    figure.axes[0].legend(frameon=False, fontsize=8)
    figure.axes[-1].set_xlabel("global batch (samples)")
    save_figure(figure, output)


def _draw_page(panels: dict[str, list[SizeCurve]], output: Path, title: str) -> None:
    figure = _plotly().subplots.make_subplots(rows=len(panels), cols=1, shared_xaxes=True)
    for row, (quantity, drawn) in enumerate(panels.items(), start=1):
        for curve, color in _colored(drawn):
            _add_traces(figure, row, curve, color)
        figure.update_yaxes(title=quantity, rangemode="tozero", row=row, col=1)
    sizes = sorted({size for drawn in panels.values() for curve in drawn for size in curve.global_batch_sizes})
    figure.update_xaxes(type="log", tickvals=sizes)
    figure.update_xaxes(title="global batch (samples)", row=len(panels), col=1)
    figure.update_layout(title=title, template="simple_white")
    try:
        # plotly's own code is written into the page, so that it opens without a network.
        # Without the button that would send what was measured to a server of plotly's.
        figure.write_html(output, include_plotlyjs=True, config={"showSendToCloud": False, "plotlyServerURL": ""})
    except OSError as error:
        raise UserError(f"{output}: {error}") from error


def _add_traces(figure: Any, row: int, curve: SizeCurve, color: str) -> None:
    """Add what was measured and what is predicted of one micro-batch size to a row of the page."""
    name = f"micro-batches of {curve.micro_batch_size}"
    common = {"x": curve.global_batch_sizes, "showlegend": row == 1, "row": row, "col": 1}
    error = {"type": "data", "symmetric": False, "array": curve.above, "arrayminus": curve.below}
    figure.add_scatter(
        **common, y=curve.measured, error_y=error, mode="markers", name=f"{name}, measured", marker={"color": color}
    )
    symbols = ["circle-open" if seen else "x" for seen in curve.seen]
    figure.add_scatter(
        **common, y=curve.predicted, mode="lines+markers", name=f"{name}, predicted (x: not calibrated on)",
        line={"color": color, "dash": "dash", "width": 1}, marker={"symbol": symbols},
    )  # fmt: skip


def _plotly() -> Any:
    try:
        import plotly.subplots
    except ImportError as error:
        raise UserError("pages need plotly: pip install 'megastable[plot]'") from error
    return plotly
