"""A picture of a ramp: global batch, TFLOPs and time over samples."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

from megastable.cli.plot import empty_figure, make_plain, save_figure
from megastable.training.plan_report import Forecast

SECONDS_PER_DAY = 86_400
SECONDS_PER_HOUR = 3_600
LONG_RUN_DAYS = 2
BEYOND_THE_RAMP = 1.2
"""How much of the run is shown, in lengths of its ramp: most of a long run is at the final batch."""


def plot_forecast(forecast: Forecast, output: Path) -> None:
    """Draw into ``output``; without a device, the batch and the share of the time that the pipeline is busy.

    Raises:
        UserError: matplotlib is not installed, or the file cannot be written.
    """
    figure = empty_figure()
    speeds = [entry.speed for entry in forecast.phases if entry.speed is not None]
    batch_axes, middle_axes, *rest = figure.subplots(3 if speeds else 2, 1, sharex=True)
    starts = [entry.phase.first_sample for entry in forecast.phases]
    samples = [*starts, forecast.plan.length.total_samples]

    def steps(values: list[float]) -> list[float]:
        return [*values, values[-1]]

    sizes: list[float] = [entry.phase.batch.global_batch_size for entry in forecast.phases]
    batch_axes.step(samples, steps(sizes), where="post", color="tab:green")
    batch_axes.set_ylabel("global batch\n(samples)")
    if speeds:
        hardware = steps([speed.hardware_tflops_per_device for speed in speeds])
        middle_axes.step(samples, hardware, where="post", color="tab:gray", linewidth=1, label="hardware")
        model = steps([speed.tflops_per_device for speed in speeds])
        middle_axes.step(samples, model, where="post", color="tab:red", label="model")
        middle_axes.set_ylabel("TFLOPs per device\n(predicted)")
        middle_axes.legend(frameon=False, loc="lower right")
        _draw_time(rest[0], forecast, samples)
    else:
        busy = steps([1 - entry.idle_share for entry in forecast.phases])
        middle_axes.step(samples, busy, where="post", color="tab:red")
        middle_axes.set_ylabel("share of the time that\nthe pipeline is busy")
    bottom = rest[0] if rest else middle_axes
    bottom.set_xlabel(_samples_label(forecast, starts[-1]))
    bottom.set_xlim(0, _shown_samples(forecast, starts[-1]))
    for axes in (batch_axes, middle_axes, *rest):
        make_plain(axes)
        axes.set_ylim(bottom=0)
    save_figure(figure, output)


def _draw_time(axes: object, forecast: Forecast, samples: list[int]) -> None:
    seconds = [entry.phase.num_steps * entry.speed.step_seconds for entry in forecast.phases if entry.speed]
    elapsed = [0.0, *accumulate(seconds)]
    shown = _shown_samples(forecast, forecast.phases[-1].phase.first_sample)
    long_run = elapsed[-1] * shown / samples[-1] > LONG_RUN_DAYS * SECONDS_PER_DAY
    unit, name = (SECONDS_PER_DAY, "days") if long_run else (SECONDS_PER_HOUR, "hours")
    axes.plot(samples, [value / unit for value in elapsed], color="tab:blue")  # type: ignore[attr-defined]
    in_view = [value / unit for sample, value in zip(samples, elapsed, strict=True) if sample <= shown]
    left = shown - samples[len(in_view) - 1]
    if left > 0:
        rate = forecast.phases[min(len(in_view), len(seconds)) - 1]
        size = rate.phase.batch.global_batch_size
        in_view.append(in_view[-1] + left / size * (rate.speed.step_seconds if rate.speed else 0.0) / unit)
    axes.set_ylim(0, 1.05 * max(in_view))  # type: ignore[attr-defined]
    axes.set_ylabel(f"time\n({name}, predicted)")  # type: ignore[attr-defined]


def _shown_samples(forecast: Forecast, ramp_end: int) -> float:
    total = forecast.plan.length.total_samples
    return min(total, BEYOND_THE_RAMP * ramp_end) if ramp_end else total


def _samples_label(forecast: Forecast, ramp_end: int) -> str:
    total = forecast.plan.length.total_samples
    cut = _shown_samples(forecast, ramp_end) < total
    return f"consumed samples (of {total:,}: the ramp and what follows it)" if cut else "consumed samples"
