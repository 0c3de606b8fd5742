"""Tables of a measurement: step times, and ratios that pair the steps of one round. Needs no torch."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Sequence
from typing import Any

from megastable.planning.measured_cost import MeasuredStep, calibrate

OWN = "megastable"
STOCK = "DeepSpeed"
LIMIT = "one process"
ONE_F_ONE_B_PEERS = (STOCK, "DeepSpeed fused", "torch 1F1B")

Row = dict[str, Any]
"""One round of one batch size: ``num_micro_batches``, ``global_batch_size``, ``seconds`` and ``losses`` by name."""
Value = Callable[[Row], float]


def ideal_seconds(limit_seconds: float, num_micro_batches: int, num_stages: int) -> float:
    """Compute what a perfect 1F1B pipeline takes where one process, which has no bubble, takes ``limit_seconds``.

    The stages have one thread each, and the process as many as there are stages. The share of the bubble is
    (p - 1) / (m + p - 1).

    PipeDream-Flush and Megatron-LM, arXiv 2104.04473, section 2.2.
    """
    return limit_seconds * (num_micro_batches + num_stages - 1) / num_micro_batches


def seconds_of(name: str) -> Value:
    """Make the value of a row that is the step time of a candidate."""
    return lambda row: row["seconds"][name]


def speed_over(name: str) -> Value:
    """Make the value that is megastable's throughput over that of a candidate."""
    return lambda row: row["seconds"][name] / row["seconds"][OWN]


def speed_over_best(row: Row) -> float:
    """Compute megastable's throughput over that of the fastest 1F1B peer of the round."""
    fastest_peer = min(row["seconds"][name] for name in ONE_F_ONE_B_PEERS if name in row["seconds"])
    return fastest_peer / row["seconds"][OWN]


def share_of_ideal(name: str, num_stages: int) -> Value:
    """Make the value that is a candidate's throughput over that of a perfect 1F1B pipeline."""
    return lambda row: ideal_seconds(row["seconds"][LIMIT], row["num_micro_batches"], num_stages) / row["seconds"][name]


def share_of_limit(name: str) -> Value:
    """Make the value that is a candidate's throughput over that of the one process without a bubble."""
    return lambda row: row["seconds"][LIMIT] / row["seconds"][name]


def cell(rows: Sequence[Row], value: Value, digits: int) -> str:
    """Format the median (least - most) over the rounds."""
    values = [value(row) for row in rows]
    low, middle, high = (f"{v:.{digits}f}" for v in (min(values), statistics.median(values), max(values)))
    return f"{middle} ({low}-{high})"


def by_batch(rows: Sequence[Row]) -> dict[int, list[Row]]:
    """Group the rounds by their global batch size, smallest first."""
    sizes = sorted({row["global_batch_size"] for row in rows})
    return {size: [row for row in rows if row["global_batch_size"] == size] for size in sizes}


def table(rows: Sequence[Row], columns: dict[str, Value], needs: dict[str, tuple[str, ...]], digits: int) -> list[str]:
    """Format a line a batch size; a cell is a dash where a candidate that it needs did not run."""
    lines = [f"| global batch | micro-batches | {' | '.join(columns)} |", f"|{'---|' * (len(columns) + 2)}"]
    for size, of_size in by_batch(rows).items():
        cells = [
            cell(of_size, value, digits) if all(name in of_size[0]["seconds"] for name in needs[title]) else "-"
            for title, value in columns.items()
        ]
        lines.append(f"| {size} | {of_size[0]['num_micro_batches']} | {' | '.join(cells)} |")
    return lines


def candidates(rows: Sequence[Row]) -> list[str]:
    """Return the names that ran at some batch size, in the order of the first row that has most of them."""
    names_of_rows = [list(row["seconds"]) for row in rows]
    return max(names_of_rows, key=len)


def markdown(result: dict[str, Any]) -> str:
    """Format the whole report of a measurement, see ``run.py`` for what it holds."""
    rows = result["rows"]
    num_stages = result["num_stages"]
    names = candidates(rows)
    peers = [name for name in names if name not in (OWN, LIMIT)]
    lines = [f"# Peers, {result['date']}", "", *facts(result), "", "## Step seconds", ""]
    lines += table(rows, {name: seconds_of(name) for name in names}, {name: (name,) for name in names}, digits=3)
    if OWN in names and peers:
        best = "best 1F1B peer of the round"
        columns = {name: speed_over(name) for name in peers}
        needs: dict[str, tuple[str, ...]] = {name: (OWN, name) for name in peers}
        first = next((name for name in ONE_F_ONE_B_PEERS if name in names), None)
        if first is not None:
            columns[best] = speed_over_best
            needs[best] = (OWN, first)
        lines += ["", "## Throughput of megastable over each", "", *table(rows, columns, needs, digits=2)]
    if LIMIT in names:
        others = [name for name in names if name != LIMIT]
        needs = {name: (LIMIT, name) for name in others}
        ideal = {name: share_of_ideal(name, num_stages) for name in others}
        limit = {name: share_of_limit(name) for name in others}
        lines += ["", f"## Share of a perfect 1F1B pipeline (one process x m / (m + {num_stages - 1}))", ""]
        lines += table(rows, ideal, needs, digits=3)
        lines += ["", "## Share of the one process, which has no bubble", "", *table(rows, limit, needs, digits=3)]
    return "\n".join([*lines, *fixed_costs(rows, num_stages)]) + "\n"


def fixed_costs(rows: Sequence[Row], num_stages: int) -> list[str]:
    """Fit what a step of each 1F1B candidate costs whatever its number of micro-batches."""
    groups = by_batch(rows)
    if len(groups) < 2:  # two unknowns, c and a
        return []
    lines = ["", f"## Fixed cost of a step: c of (m + {num_stages - 1}) a + c, fitted to the medians", ""]
    lines += ["| | c, seconds | a, seconds | c over a |", "|---|---|---|---|"]
    for name in (OWN, *ONE_F_ONE_B_PEERS):
        ran = [of_size for of_size in groups.values() if name in of_size[0]["seconds"]]
        if len(ran) < 2:
            continue
        steps = [
            MeasuredStep(1, of_size[0]["num_micro_batches"], statistics.median(map(seconds_of(name), of_size)))
            for of_size in ran
        ]
        cost = calibrate(steps, num_stages)
        each = cost.passes(1).slowest_stage
        # On a busy machine a larger batch may take no longer than a smaller one, and then all of a step is fixed.
        ratio = f"{cost.fixed_seconds / each:.2f}" if each > 0 else "-"
        lines.append(f"| {name} | {cost.fixed_seconds:.3f} | {each:.3f} | {ratio} |")
    return lines


def facts(result: dict[str, Any]) -> list[str]:
    """Say where and on what it was measured, and what could not be."""
    hardware = result["hardware"]
    settings = result["settings"]
    rounds = {size: len(of_size) for size, of_size in by_batch(result["rows"]).items()}
    spread = max(loss_spread(row, without=result["refused"]) for row in result["rows"])
    lines = [
        f"{hardware['cores']} cores of {hardware['cpu']} (16-bit products: {hardware['bf16'] or 'none native'}), torch "
        f"{hardware['torch']}, DeepSpeed {hardware['deepspeed']}, load average at the start {hardware['load']:.1f}.",
        "",
        f"GPT: {', '.join(f'{key} {value}' for key, value in settings.items())}; {result['num_stages']} stages on as "
        "many single-threaded processes, one process with as many threads.",
        "",
        f"Layers are cut at {result['bounds']}. Rounds by global batch: {rounds}. Cells: median (least-most) over the "
        "rounds; ratios pair the steps of a round.",
        "",
        f"Losses of one step differ by {spread:.1e} of their size at most, between candidates that took every step.",
    ]
    refused = [
        f"- {name} at a global batch of {size}: {reason}"
        for name, reasons in result["refused"].items()
        for size, reason in reasons.items()
    ]
    if refused:
        lines += ["", "Not run:", "", *refused]
    return lines


def loss_spread(row: Row, without: Collection[str]) -> float:
    """Return the largest difference of the round's losses over the largest of them."""
    # A candidate that missed a step has taken fewer, so that its loss is another one rightly.
    losses = [loss for name, loss in row["losses"].items() if name not in without]
    return (max(losses) - min(losses)) / max(abs(loss) for loss in losses)
