"""Throughput over the global batch: every size on one engine, in turns, beside what the pipeline's cost model predicts.

  deepspeed --num_gpus 2 benchmarks/tflops_vs_gbs.py --deepspeed_config ds_configs/bench_cpu.json \\
      --global-batch-sizes 2,4,8,16,32,64 --json sweep.json --plot sweep

Printed are, for every size, the median, least and most seconds of a step, its speed, bubble, and share of the limit
m/(m+p-1) (megastable/planning/throughput.py says what of), the step predicted from half of the sizes, and the size from
which a ramp is worth starting. The first round is dropped, and the large sizes sit out some of the others. The tokens
are random. --json writes what `megastable plan --calibration` reads. --dry-run prints what can be said without
measuring, in one process.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from megastable.cli.plan import probe_this_cpu
from megastable.cli.sweep import check_can_plot, comparison, plot_sweep, show_sweep
from megastable.config import load_run_file
from megastable.core.batch_rampup import Batch
from megastable.core.devices import GPU_RESERVED_GIB
from megastable.core.errors import UserError
from megastable.core.launch import Launch
from megastable.core.memory import GIB
from megastable.core.scripts import Parser, run_script
from megastable.planning.calibration import CalibrationFile, calibration_file, check_new, load_calibration
from megastable.planning.forecast import Basis
from megastable.planning.run_plan import RunPlan, number_of_devices
from megastable.planning.sweep import SweepReport, as_section, measured_sweep, planned_sweep, work_of
from megastable.planning.throughput import DEFAULT_SHARE, parse_sizes, steps_of_each, sweep_batches, takes_part
from megastable.training.entry import refuse
from megastable.training.host import cpu_name, memory_gib_per_process


def main() -> int:
    """Sweep as the command line asks for; returns the exit code."""
    arguments = parse_arguments()
    try:
        launch = Launch.detect(os.environ)
        plan = plan_of(arguments, launch)
        micro_batch_sizes = arguments.micro_batch_sizes
        if micro_batch_sizes is None:
            micro_batch_sizes = str(plan.run.train_micro_batch_size_per_gpu)
        batches = sweep_batches(
            parse_sizes(arguments.global_batch_sizes, "--global-batch-sizes"),
            parse_sizes(micro_batch_sizes, "--micro-batch-sizes"),
            plan.layout.data_parallel_size,
        )
        check_outputs(arguments)
        if arguments.dry_run:
            cost = Basis.of(plan, arguments.device, calibration=arguments.calibration, probe=probe_this_cpu).cost(plan)
            report = planned_sweep(plan, batches, arguments.share, cost)
            if launch.rank == 0:
                show_sweep(report, f"{arguments.deepspeed_config}, nothing measured")
            return 0
        run_sweep(arguments, plan, launch, batches)
    except UserError as error:
        return refuse(error)
    return 0


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deepspeed_config", required=True, type=Path, metavar="FILE", help="the run file")
    parser.add_argument("--global-batch-sizes", required=True, metavar="N,N", help="samples a step, e.g. 2,4,8")
    parser.add_argument("--micro-batch-sizes", metavar="N,N", help="every size in each of these (default: the file's)")
    parser.add_argument("--rounds", type=int, default=5, help="turns after the first, which is dropped (5)")
    parser.add_argument(
        "--share", type=float, default=DEFAULT_SHARE, help="of the top speed that a start reaches (0.5)"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write a new calibration file")
    parser.add_argument("--plot", type=Path, metavar="PREFIX", help="write new PREFIX.png and PREFIX.html")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides", help="as in a run")
    parser.add_argument("--dry-run", action="store_true", help="measure nothing")
    parser.add_argument("--device", help="with --dry-run, predict for it: A100, H100, H200, or cpu (ten seconds)")
    parser.add_argument("--calibration", type=Path, metavar="PATH", help="predict from such a file, too")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # deepspeed's launcher appends it
    return parser.parse_args()


def plan_of(arguments: argparse.Namespace, launch: Launch) -> RunPlan:
    """Plan for the launch, or for as many processes as the file asks for where a dry run stands alone.

    Raises:
        UserError: the run file or an option is refused.
    """
    if arguments.rounds < 1:
        raise UserError(f"--rounds {arguments.rounds}: must be at least 1")
    if not 0 < arguments.share <= 1:
        raise UserError(f"--share {arguments.share:g}: must be above 0 and at most 1")
    world_size = launch.world_size
    if arguments.dry_run and world_size == 1:
        run = load_run_file(arguments.deepspeed_config, arguments.overrides)
        world_size, _ = number_of_devices(run, None)
    return RunPlan.of(load_run_file(arguments.deepspeed_config, arguments.overrides, world_size), world_size)


def check_outputs(arguments: argparse.Namespace) -> None:
    """Refuse what cannot be written, or would go unread, before anything is measured.

    Raises:
        UserError: a file exists, a package is missing, or an option belongs to the other mode.
    """
    if arguments.dry_run and (arguments.json or arguments.plot):
        raise UserError("--json and --plot write what was measured; --dry-run measures nothing")
    if not arguments.dry_run and arguments.device:
        raise UserError("--device belongs to --dry-run; a sweep predicts from its own steps, or from a --calibration")
    if arguments.json:
        check_new(arguments.json)
    if arguments.plot:
        check_can_plot(arguments.plot)


def run_sweep(arguments: argparse.Namespace, plan: RunPlan, launch: Launch, batches: list[Batch]) -> None:
    """Measure together with the other ranks; rank 0 prints and writes."""
    other = None
    if arguments.calibration:
        other = load_calibration(arguments.calibration, plan)

    from megastable.engine.process_group import connected  # loads torch and deepspeed

    with connected(launch):
        seconds = measure(plan, batches, arguments.rounds, talks=launch.rank == 0)
    if launch.rank != 0:
        return
    report = measured_sweep(plan, seconds, arguments.share)
    show_sweep(report, f"{arguments.deepspeed_config} on {launch.world_size} processes")
    if other is not None:
        print(comparison(report, other))
    if arguments.json:
        described(plan, report, launch).write(arguments.json)
    if arguments.plot:
        plot_sweep(report.rows, work_of(plan), arguments.plot, str(arguments.deepspeed_config))


def measure(plan: RunPlan, batches: list[Batch], rounds: int, talks: bool) -> dict[Batch, list[float]]:
    """Return the seconds of every batch's steps, on this rank; collective."""
    from small_runs import build_engine, random_micro_batches  # loads torch and deepspeed

    engine = build_engine(plan)
    steps = steps_of_each(batches, rounds)
    seconds: dict[Batch, list[float]] = {batch: [] for batch in batches}
    for number in range(rounds + 1):
        for batch in batches:
            if number > 0 and not takes_part(number, steps[batch], rounds):
                continue
            engine.rampup_hook.apply(batch)
            micro_batches = random_micro_batches(plan, batch) if engine.needs_data else None
            took = engine.train_batch(micro_batches, learning_rate=plan.run.optimizer.params.lr).step_seconds
            if number > 0:  # the first step of each sets things up
                seconds[batch].append(took)
            if talks:
                name = f"round {number} of {rounds}" if number else "warm-up, dropped"
                print(f"{name}: global batch {batch.global_batch_size}: {took:.3g} s", file=sys.stderr, flush=True)
    return seconds


def described(plan: RunPlan, report: SweepReport, launch: Launch) -> CalibrationFile:
    """Make the sweep's calibration file."""
    import torch

    on_cpu = os.environ.get("DS_ACCELERATOR") == "cpu" or not torch.cuda.is_available()
    if on_cpu:
        device = cpu_name()
        memory_gib = memory_gib_per_process(launch.local_world_size)
    else:
        device = torch.cuda.get_device_name()
        _, total_bytes = torch.cuda.mem_get_info()
        memory_gib = total_bytes / GIB - GPU_RESERVED_GIB
    assert report.cost is not None
    file = calibration_file(plan, report.cost, method="sweep", device=device, on_cpu=on_cpu, memory_gib=memory_gib)
    return file.model_copy(update={"sweep": as_section(report)})


if __name__ == "__main__":
    run_script(main)
