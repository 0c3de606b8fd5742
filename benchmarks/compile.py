"""Whether ``megastable.model.compile`` pays: steps with and without it in turns, and its seconds at first.

One process, the real engine. Run it with `python benchmarks/compile.py`; set TORCHINDUCTOR_CACHE_DIR to an empty
folder, or the seconds are those of a run whose kernels are in the cache.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

from synthetic import random_micro_batches, small_run

from megastable.config import RunConfig, run_from_dict
from megastable.config.run_config import run_as_dict
from megastable.core.launch import Launch
from megastable.engine.process_group import connected
from megastable.engine.training_engine import TrainingEngine
from megastable.planning.run_plan import RunPlan

FORMATS = ("fp32", "bf16")


def main() -> None:
    """Print a row for every number format."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--layers", type=int, default=4, help="transformer blocks")
    parser.add_argument("--hidden", type=int, default=128, help="hidden size, a multiple of 64")
    parser.add_argument("--seq-length", type=int, default=128, help="tokens a sample")
    parser.add_argument("--batch", type=int, default=8, help="samples a step")
    parser.add_argument("--rounds", type=int, default=12, help="steps of each kind, in turns")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS, help="of the weights")
    arguments = parser.parse_args()
    print("| hidden | seq | format | step on / off, median (least to most) | step off, s | compile, s |", flush=True)
    with connected(Launch.detect(os.environ)):
        for number_format in arguments.formats:
            print(measured_row(arguments, number_format), flush=True)


def measured_row(arguments: argparse.Namespace, number_format: str) -> str:
    """Time steps with and without compilation in turns."""
    plan, plain = engine_of(arguments, number_format, compiled=False)
    _, compiled = engine_of(arguments, number_format, compiled=True)
    first, _ = step_seconds(compiled, plan), step_seconds(plain, plan)
    pairs = [(step_seconds(compiled, plan), step_seconds(plain, plan)) for _ in range(arguments.rounds)]
    ratios = [on / off for on, off in pairs]
    steady = statistics.median(on for on, _ in pairs)
    return (
        f"| {arguments.hidden} | {arguments.seq_length} | {number_format} | {statistics.median(ratios):.2f} "
        f"({min(ratios):.2f} to {max(ratios):.2f}) | {statistics.median(off for _, off in pairs):.3f} | "
        f"{first - steady:.0f} |"
    )


def engine_of(arguments: argparse.Namespace, number_format: str, compiled: bool) -> tuple[RunPlan, TrainingEngine]:
    """The engine of the run that ``arguments`` describe."""
    plan = RunPlan.of(run_of(arguments, number_format, compiled), world_size=1)
    return plan, TrainingEngine(plan.run, plan.layout, plan.ramp, Path(tempfile.gettempdir()))


def run_of(arguments: argparse.Namespace, number_format: str, compiled: bool) -> RunConfig:
    """``small_run`` with the two keys."""
    values = run_as_dict(small_run(arguments, arguments.batch))
    values["bf16"] = {"enabled": number_format == "bf16"}
    values["megastable"]["model"]["compile"] = compiled
    return run_from_dict(values)


def step_seconds(engine: TrainingEngine, plan: RunPlan) -> float:
    """One step on random tokens."""
    engine.rampup_hook.before_step(0)
    started = time.perf_counter()
    engine.train_batch(random_micro_batches(plan), 1e-4)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
