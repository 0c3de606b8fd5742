"""A sweep over batches as a table."""

from __future__ import annotations

from collections.abc import Callable

from megastable.cli.cells import ABSENT, percent, significant, whole
from megastable.cli.plan import make_table, wide_console
from megastable.core.batch_rampup import Batch
from megastable.core.throughput import SweepRow
from megastable.training.plan_report.sweep import SweepReport

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
