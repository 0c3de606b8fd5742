"""A picture of a measurement: throughput over that of the one process, by global batch."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from report import LIMIT, OWN, by_batch, candidates, ideal_seconds, share_of_limit


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw a line a candidate through its medians, and a band from least to most."""
    # Here and not above: the measurement and its --help need no matplotlib, only a picture does.
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, NullLocator, PercentFormatter

    groups = by_batch(result["rows"])
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for name in (name for name in candidates(result["rows"]) if name != LIMIT):
        of_name = {size: [row for row in rows if name in row["seconds"]] for size, rows in groups.items()}
        shares = {size: [share_of_limit(name)(row) for row in rows] for size, rows in of_name.items() if rows}
        width = 2.4 if name == OWN else 1.3
        (line,) = axes.plot(list(shares), [statistics.median(v) for v in shares.values()], "o-", lw=width, label=name)
        least = [min(values) for values in shares.values()]
        most = [max(values) for values in shares.values()]
        axes.fill_between(list(shares), least, most, color=line.get_color(), alpha=0.12, lw=0)
    ideal = [1 / ideal_seconds(1.0, rows[0]["num_micro_batches"], result["num_stages"]) for rows in groups.values()]
    axes.plot(list(groups), ideal, ":", color="black", label="a perfect 1F1B pipeline")
    axes.axhline(1.0, color="grey", lw=0.8)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(list(groups)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels([str(size) for size in groups])
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set(xlabel="global batch (samples)", ylabel="throughput over one process without a bubble")
    axes.set_title(f"{result['date']}, {result['hardware']['cores']} cores of {result['hardware']['cpu']}", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=90)
