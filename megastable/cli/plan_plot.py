"""A picture of a ramp: global batch, TFLOPs and time over samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megastable.cli.plot import empty_figure, make_plain, save_figure
from megastable.planning.forecast import Forecast

SECONDS_PER_HOUR = 3_600
HOURS_PER_DAY = 24
LONG_RUN_HOURS = 48
BEYOND_THE_RAMP = 1.2
"""How much of the run is shown, in lengths of its ramp: most of a long run is at the final batch."""


def plot_forecast(forecast: Forecast, output: Path) -> None:
    """Draw into ``output``; without a device, the batch and the share of the time that the pipeline is busy.

    Raises:
        UserError: matplotlib is not installed, or the file cannot be written.
    """
    figure = empty_figure()
    speeds = [entry.speed for entry in forecast.phases if entry.speed is not None]
    every_axes = figure.subplots(3 if speeds else 2, 1, sharex=True)
    samples = [*(entry.phase.first_sample for entry in forecast.phases), _last_shown_sample(forecast)]

    def draw(axes: Any, values: list[float], **style: Any) -> None:
        axes.step(samples, [*values, values[-1]], where="post", **style)

    draw(every_axes[0], [entry.phase.batch.global_batch_size for entry in forecast.phases], color="tab:green")
    every_axes[0].set_ylabel("global batch\n(samples)")
    if speeds:
        draw(every_axes[1], [speed.hardware_tflops_per_device for speed in speeds], color="tab:gray", label="hardware")
        draw(every_axes[1], [speed.tflops_per_device for speed in speeds], color="tab:red", label="model")
        every_axes[1].set_ylabel("TFLOPs per device\n(predicted)")
        every_axes[1].legend(frameon=False, loc="lower right")
        _draw_time(every_axes[2], forecast, samples)
    else:
        draw(every_axes[1], [1 - entry.idle_share for entry in forecast.phases], color="tab:red")
        every_axes[1].set_ylabel("share of the time that\nthe pipeline is busy")
    total = forecast.plan.length.total_samples
    cut = f" (of {total:,} in the run)" if samples[-1] < total else ""
    every_axes[-1].set_xlabel(f"consumed samples{cut}")
    every_axes[-1].xaxis.set_major_formatter("{x:,.0f}")
    for axes in every_axes:
        make_plain(axes)
        axes.set_xlim(0, samples[-1])
        axes.set_ylim(bottom=0)
    save_figure(figure, output)


def _draw_time(axes: Any, forecast: Forecast, samples: list[int]) -> None:
    hours = [0.0]
    for entry, first, end in zip(forecast.phases, samples, samples[1:], strict=False):
        steps = (end - first) / entry.phase.batch.global_batch_size
        hours.append(hours[-1] + steps * (entry.speed.step_seconds if entry.speed else 0.0) / SECONDS_PER_HOUR)
    in_days = hours[-1] > LONG_RUN_HOURS
    axes.plot(samples, [value / HOURS_PER_DAY if in_days else value for value in hours], color="tab:blue")
    axes.set_ylabel(f"time\n({'days' if in_days else 'hours'}, predicted)")


def _last_shown_sample(forecast: Forecast) -> int:
    total, ramp_end = forecast.plan.length.total_samples, forecast.phases[-1].phase.first_sample
    return min(total, round(BEYOND_THE_RAMP * ramp_end)) if ramp_end else total
