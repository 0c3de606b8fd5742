"""Pictures of a sweep over batches: speed and step time over the global batch, as PNG and as a page of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from megastable.cli.plot import empty_figure, make_plain, save_figure
from megastable.core.errors import UserError
from megastable.core.flops import tflops_per_device
from megastable.core.throughput import SweepRow, Work
from megastable.training.plan_report.calibration_file import check_new

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
    empty_figure()
    _plotly()
    for path in plot_paths(prefix):
        check_new(path)


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
