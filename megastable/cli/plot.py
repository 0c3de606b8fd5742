"""A picture of a run: loss, global batch and TFLOPs over consumed samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megastable.core.errors import UserError
from megastable.core.run_paths import RunPaths


def plot_run(run_dir: Path, output: Path) -> None:
    """Draw ``metrics.jsonl`` of ``run_dir`` into ``output``.

    Raises:
        UserError: there are no metrics, or matplotlib is not installed.
    """
    figure = empty_figure()
    rows = read_metrics(RunPaths(run_dir).metrics)
    samples = [row["consumed_samples"] for row in rows]
    evaluations = [(row["consumed_samples"], row["eval_loss"]) for row in rows if "eval_loss" in row]

    loss_axes, batch_axes, tflops_axes = figure.subplots(3, 1, sharex=True, height_ratios=(2, 1, 1))
    loss_axes.plot(samples, [row["loss"] for row in rows], color="tab:blue", linewidth=1, label="training loss")
    if evaluations:
        loss_axes.plot(*zip(*evaluations, strict=True), "o-", color="tab:orange", label="validation loss")
    loss_axes.set_ylabel("nats per token")
    loss_axes.legend(frameon=False)
    batch_axes.step(samples, [row["global_batch_size"] for row in rows], color="tab:green", where="pre")
    batch_axes.set_ylabel("global batch\n(samples)")
    tflops_axes.plot(samples, [row["tflops_per_device"] for row in rows], color="tab:red", linewidth=1)
    tflops_axes.set_ylabel("TFLOPs per device\n(model)")
    tflops_axes.set_xlabel("consumed samples")
    for axes in (loss_axes, batch_axes, tflops_axes):
        make_plain(axes)
    for axes in (batch_axes, tflops_axes):
        axes.set_ylim(bottom=0)
    save_figure(figure, output)


def empty_figure() -> Any:
    """A figure for three curves above each other.

    Raises:
        UserError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError("pictures need matplotlib: pip install 'megastable[plot]'") from error
    return Figure(figsize=(8, 6.5), layout="constrained")


def make_plain(axes: Any) -> None:
    """No frame, a faint grid."""
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


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a ``metrics.jsonl``.

    Raises:
        UserError: the file is missing or empty.
    """
    if not path.is_file():
        raise UserError(f"{path} does not exist; name a run folder")
    text = path.read_text(encoding="utf-8")
    whole_lines = text[: text.rfind("\n") + 1]  # a running or killed run may have half a line at the end
    rows = [json.loads(line) for line in whole_lines.splitlines()]
    if not rows:
        raise UserError(f"{path} is empty: the run has not finished its first step")
    return rows
