"""What watching costs: the time of a watched step beside that of an unwatched one, and of a consistency check.

Run it with `torchrun --standalone --nproc_per_node 2 benchmarks/monitors.py`.
"""

from __future__ import annotations

import os
import statistics
from collections import defaultdict

from small_runs import build_engine, model_parser, small_run, timed_step

from megastable.core.launch import Launch
from megastable.core.scripts import run_script
from megastable.engine.process_group import connected
from megastable.planning.run_plan import RunPlan

DEFAULT_INTERVAL = 10
DEFAULT_CONSISTENCY_INTERVAL = 100


def main() -> None:
    """Time watched and unwatched steps in turns and print their ratios."""
    parser = model_parser(__doc__, hidden=256, seq_length=256)
    parser.add_argument("--batch", type=int, default=16, help="samples a step")
    parser.add_argument("--rounds", type=int, default=12, help="steps of each kind, in turns")
    arguments = parser.parse_args()
    launch = Launch.detect(os.environ)
    with connected(launch):
        run = small_run(arguments, arguments.batch, pipeline={"num_stages": launch.world_size})
        plan = RunPlan.of(run, launch.world_size)
        engine = build_engine(plan)
        seconds: dict[str, list[float]] = defaultdict(list)
        for turn in range(arguments.rounds + 1):
            for kind in ("unwatched", "watched"):
                step_seconds = timed_step(engine, plan, watch=kind == "watched")
                if turn > 0:  # the first step of each sets things up
                    seconds[kind].append(step_seconds)
            _, check_seconds = engine.check_consistency()
            if turn > 0:
                seconds["check"].append(check_seconds)
        if launch.rank == 0:
            print_shares(seconds)


def print_shares(seconds: dict[str, list[float]]) -> None:
    """Print medians over the rounds, as shares of an unwatched step."""
    step = statistics.median(seconds["unwatched"])
    ratios = [w / u for w, u in zip(seconds["watched"], seconds["unwatched"], strict=True)]
    watched = statistics.median(ratios) - 1
    check = statistics.median(seconds["check"]) / step
    print(
        f"a watched step takes {watched:+.1%} ({min(ratios) - 1:+.1%} to {max(ratios) - 1:+.1%}) of an unwatched one;"
    )
    print(f"at an interval of {DEFAULT_INTERVAL} steps: {watched / DEFAULT_INTERVAL:+.2%}")
    print(f"a consistency check takes {check:.1%} of a step;")
    print(f"at an interval of {DEFAULT_CONSISTENCY_INTERVAL} steps: {check / DEFAULT_CONSISTENCY_INTERVAL:.2%}")


if __name__ == "__main__":
    run_script(main)
