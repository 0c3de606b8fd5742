"""Pictures that matplotlib draws: a run that was trained, and the forecast of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megastable.cli.run_files import number, objects_in
from megastable.core.errors import UserError
from megastable.planning.forecast import Forecast, PhaseSpeed
from megastable.training.run_folder import RunFolder

SECONDS_PER_HOUR = 3_600
HOURS_PER_DAY = 24
LONG_RUN_HOURS = 48
"""A longer run is drawn in days."""
BEYOND_THE_RAMP = 1.2
"""How much of the run is shown, in lengths of its ramp: most of a long run is at the final batch."""


def empty_figure() -> Any:
    """Make a figure for three curves above each other.

    Raises:
        UserError: matplotlib is not installed.
    """
    # Figure, not pyplot: nothing is shown, and pyplot would keep every figure alive in a global list.
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError("pictures need matplotlib: pip install 'megastable[plot]'") from error
    return Figure(figsize=(8, 6.5), layout="constrained")


def make_plain(axes: Any) -> None:
    """Take the frame away and draw a faint grid."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)


def save_figure(figure: Any, output: Path) -> None:
    """Write the picture.

    Raises:
        UserError: the suffix is unknown or the folder missing.
    """
    try:
        figure.savefig(output, dpi=130)
    except (ValueError, OSError) as error:
        raise UserError(f"{output}: {error}") from error


# A run that was trained


def plot_run(run_dir: Path, output: Path) -> None:
    """Draw loss, global batch and speed of ``metrics.jsonl`` in ``run_dir`` into ``output``.

    Raises:
        UserError: no metrics exist, matplotlib is not installed, or the file cannot be written.
    """
    figure = empty_figure()
    rows = read_metrics(RunFolder(run_dir).metrics)
    samples = [row["consumed_samples"] for row in rows]
    evaluated = [row for row in rows if "eval_loss" in row]

    loss_axes, batch_axes, tflops_axes = figure.subplots(3, 1, sharex=True, height_ratios=(2, 1, 1))
    loss_axes.plot(samples, [number(row, "loss") for row in rows], color="tab:blue", linewidth=1, label="training loss")
    if evaluated:
        loss_axes.plot(
            [row["consumed_samples"] for row in evaluated], [number(row, "eval_loss") for row in evaluated],
            "o-", color="tab:orange", label="validation loss",
        )  # fmt: skip
    loss_axes.set_ylabel("nats per token")
    loss_axes.legend(frameon=False)
    # consumed_samples counts to the end of a step, so a step's batch reaches back to the sample before it.
    batch_axes.step(samples, [number(row, "global_batch_size") for row in rows], color="tab:green", where="pre")
    batch_axes.set_ylabel("global batch\n(samples)")
    tflops_axes.plot(samples, [number(row, "tflops_per_device") for row in rows], color="tab:red", linewidth=1)
    tflops_axes.set_ylabel("TFLOPs per device\n(model)")
    tflops_axes.set_xlabel("consumed samples")
    for axes in (loss_axes, batch_axes, tflops_axes):
        make_plain(axes)
    for axes in (batch_axes, tflops_axes):
        axes.set_ylim(bottom=0)
    save_figure(figure, output)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a ``metrics.jsonl`` that can be drawn; a killed run leaves half a line.

    Raises:
        UserError: the file is missing, or no step can be read from it.
    """
    if not path.is_file():
        raise UserError(f"{path} does not exist; name a run folder")
    rows = objects_in(path.read_bytes().splitlines())
    # Other values may be null, where they were not finite.
    drawn = [row for row in rows if number(row, "consumed_samples") is not None]
    if not drawn:
        raise UserError(f"{path} holds no step: the run has not finished its first, or its lines cannot be read")
    return drawn


# The forecast of a run


def plot_forecast(forecast: Forecast, output: Path) -> None:
    """Draw batch, speed and time over samples; without a device, the batch and how busy the pipeline is.

    Raises:
        UserError: matplotlib is not installed, or the file cannot be written.
    """
    figure = empty_figure()
    speeds = [entry.speed for entry in forecast.phases if entry.speed is not None]
    # Speeds are known of all phases or of none.
    num_panels = 3 if speeds else 2
    panels = figure.subplots(num_panels, 1, sharex=True)
    # One sample more than phases: every phase from its first sample to that of the next, the last to the edge.
    samples = [*(entry.phase.first_sample for entry in forecast.phases), _last_shown_sample(forecast)]

    batches = [float(entry.phase.batch.global_batch_size) for entry in forecast.phases]
    _draw_steps(panels[0], samples, batches, color="tab:green")
    panels[0].set_ylabel("global batch\n(samples)")
    if speeds:
        _draw_speeds(panels[1], samples, speeds)
        seconds_per_sample = [speed.step_seconds / batch for speed, batch in zip(speeds, batches, strict=True)]
        _draw_time(panels[2], samples, seconds_per_sample)
    else:
        _draw_steps(panels[1], samples, [1 - entry.idle_share for entry in forecast.phases], color="tab:red")
        panels[1].set_ylabel("share of the time that\nthe pipeline is busy")
    _label_samples(panels[-1], samples[-1], forecast.plan.length.total_samples)
    for axes in panels:
        make_plain(axes)
        axes.set_xlim(0, samples[-1])
        axes.set_ylim(bottom=0)
    save_figure(figure, output)


def _draw_steps(axes: Any, samples: list[int], values: list[float], **style: Any) -> None:
    """Draw a value for every phase, constant from its first sample to its end."""
    axes.step(samples, [*values, values[-1]], where="post", **style)


def _draw_speeds(axes: Any, samples: list[int], speeds: list[PhaseSpeed]) -> None:
    hardware = [speed.hardware_tflops_per_device for speed in speeds]
    _draw_steps(axes, samples, hardware, color="tab:gray", label="hardware")
    _draw_steps(axes, samples, [speed.tflops_per_device for speed in speeds], color="tab:red", label="model")
    axes.set_ylabel("TFLOPs per device\n(predicted)")
    axes.legend(frameon=False, loc="lower right")


def _draw_time(axes: Any, samples: list[int], seconds_per_sample: list[float]) -> None:
    """Draw the time since the start at the ends of all phases."""
    hours = [0.0]
    for index, seconds in enumerate(seconds_per_sample):
        # By samples, not by the phase's number of steps: the last phase is cut where the picture ends.
        num_samples = samples[index + 1] - samples[index]
        hours.append(hours[-1] + num_samples * seconds / SECONDS_PER_HOUR)
    if hours[-1] > LONG_RUN_HOURS:
        axes.plot(samples, [value / HOURS_PER_DAY for value in hours], color="tab:blue")
        axes.set_ylabel("time\n(days, predicted)")
    else:
        axes.plot(samples, hours, color="tab:blue")
        axes.set_ylabel("time\n(hours, predicted)")


def _label_samples(axes: Any, last_shown: int, total_samples: int) -> None:
    label = "consumed samples"
    if last_shown < total_samples:
        label += f" (of {total_samples:,} in the run)"
    axes.set_xlabel(label)
    axes.xaxis.set_major_formatter("{x:,.0f}")


def _last_shown_sample(forecast: Forecast) -> int:
    total_samples = forecast.plan.length.total_samples
    ramp_end = forecast.phases[-1].phase.first_sample
    if ramp_end == 0:  # a single phase: without a ramp, the whole run is shown
        return total_samples
    return min(total_samples, round(BEYOND_THE_RAMP * ramp_end))
