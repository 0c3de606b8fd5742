"""Whether ``megastable.model.compile`` pays: steps with and without it in turns, and its seconds at first.

One process, the real engine. Run it with `python benchmarks/compile.py`; set TORCHINDUCTOR_CACHE_DIR to an empty
folder, or the seconds are those of a run whose kernels are in the cache.
"""

from __future__ import annotations

import argparse
import os
import statistics

from small_runs import build_engine, model_parser, small_run, timed_step

from megastable.config import RunConfig, run_from_dict
from megastable.config.run_config import run_as_dict
from megastable.core.launch import Launch
from megastable.core.scripts import run_script
from megastable.engine.process_group import connected
from megastable.planning.run_plan import RunPlan

FORMATS = ("fp32", "bf16")


def main() -> None:
    """Print a row for every number format."""
    parser = model_parser(__doc__, hidden=128, seq_length=128)
    parser.add_argument("--batch", type=int, default=8, help="samples a step")
    parser.add_argument("--rounds", type=int, default=12, help="steps of each kind, in turns")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS, help="of the weights")
    arguments = parser.parse_args()
    print("| hidden | seq | format | step on / off, median (least to most) | step off, s | compile, s |", flush=True)
    with connected(Launch.detect(os.environ)):
        for number_format in arguments.formats:
            print(measured_row(arguments, number_format), flush=True)


def measured_row(arguments: argparse.Namespace, number_format: str) -> str:
    """Time steps with and without compilation in turns, and format their row of the table."""
    plan = RunPlan.of(run_of(arguments, number_format, compiled=False), world_size=1)
    plain = build_engine(plan)
    compiled = build_engine(RunPlan.of(run_of(arguments, number_format, compiled=True), world_size=1))
    first = timed_step(compiled, plan)  # compiles
    timed_step(plain, plan)  # sets things up; its seconds are not wanted
    pairs = [(timed_step(compiled, plan), timed_step(plain, plan)) for _ in range(arguments.rounds)]
    ratios = [on / off for on, off in pairs]
    steady = statistics.median(on for on, _ in pairs)
    return (
        f"| {arguments.hidden} | {arguments.seq_length} | {number_format} | {statistics.median(ratios):.2f} "
        f"({min(ratios):.2f} to {max(ratios):.2f}) | {statistics.median(off for _, off in pairs):.3f} | "
        f"{first - steady:.0f} |"
    )


def run_of(arguments: argparse.Namespace, number_format: str, compiled: bool) -> RunConfig:
    """Build the run that ``arguments`` describe in a number format, compiled or not."""
    values = run_as_dict(small_run(arguments, arguments.batch))
    values["bf16"] = {"enabled": number_format == "bf16"}
    values["megastable"]["model"]["compile"] = compiled
    return run_from_dict(values)


if __name__ == "__main__":
    run_script(main)
