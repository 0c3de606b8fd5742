"""megastable beside its peers: the same GPT, precision, optimizer, clipping and tokens, two stages on two processes.

  torchrun --standalone --nproc_per_node 2 benchmarks/peers/run.py --rounds 10 --json benchmarks/peers/results/NAME.json
  torchrun --standalone --nproc_per_node 2 benchmarks/peers/run.py --check     # do they learn the same? fp32

All candidates live in the same two single-threaded processes and take every step in turns, in an order that rotates
with the rounds, so that a busy machine slows all alike; trust the ratios, not the seconds. Candidates:

  megastable       this repository's engine
  DeepSpeed        its PipelineModule with its defaults: its own cut, buckets, AdamW as torch makes it by default
  DeepSpeed fused  the same with torch's fused AdamW
  torch 1F1B       torch.distributed.pipelining, fused AdamW on fp32 copies of the weights, megastable's cut
  torch ZBV        the same under the zero-bubble V schedule: two stages a process
  one process      a plain loop with two threads, which has no bubble: the limit

A step runs from a barrier to the end of the last process. The first step of each batch size is dropped.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import sys
import time
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from check import TOLERANCE, largest_differences
from deepspeed.accelerator import get_accelerator
from gpt import DTYPES, NUM_STAGES, Settings
from measure import measure
from own_engine import own_bounds
from plot import draw
from report import LIMIT, OWN, markdown
from stock_deepspeed import StockDeepSpeed
from trainers import PEERS, Trainer

from megastable.core.errors import UserError
from megastable.core.host import usable_cpus
from megastable.core.launch import Launch
from megastable.core.scripts import Parser, run_script
from megastable.engine.process_group import connected

TIMED_BATCHES = "2,4,8,16,32,64"
CHECKED_BATCHES = "4,8"
TIMED_LEARNING_RATE = 1e-4
CHECKED_LEARNING_RATE = 1e-3  # at 1e-4 a norm that was not summed over the ranks stayed within the tolerance
GRACE_SECONDS = 120  # past the time limit, for the step under way; then a hanging run is ended


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8, help="transformer blocks, at least four (8)")
    parser.add_argument("--hidden", type=int, default=512, help="hidden size, a multiple of 64 (512)")
    parser.add_argument("--seq-length", type=int, default=256, help="tokens a sample (256)")
    parser.add_argument("--micro-batch-size", type=int, default=2, help="samples a micro-batch (2)")
    parser.add_argument(
        "--batches", metavar="N,N", help=f"global batch sizes ({TIMED_BATCHES}; with --check {CHECKED_BATCHES})"
    )
    parser.add_argument("--rounds", type=int, default=10, help="steps of each candidate at each batch size (10)")
    parser.add_argument("--only", metavar="NAME,NAME", help=f"some of the candidates: {', '.join(PEERS)}")
    parser.add_argument(
        "--precision", choices=DTYPES,
        help="number format of weights and gradients (bf16, with fp32 master weights and moments; --check: fp32). "
        "All candidates train megastable's layers, whose bf16 products run in fp32 between casts where the processor "
        "has no 16-bit arithmetic",
    )  # fmt: skip
    parser.add_argument(
        "--json", type=Path, metavar="PATH",
        help="a new file for all step times; tables (.md) and a picture (.png) go beside it",
    )  # fmt: skip
    parser.add_argument(
        "--time-limit", type=float, default=60.0, metavar="MINUTES",
        help="begin no batch after this time, and report the rounds that were done (60)",
    )  # fmt: skip
    parser.add_argument(
        "--check", action="store_true",
        help=f"no timing: compare the loss curves in fp32 with one process, exit code 1 beyond {TOLERANCE:g} relative",
    )  # fmt: skip
    return parser.parse_args()


def read_settings(arguments: argparse.Namespace) -> tuple[Settings, list[int], list[str]]:
    """Return the model, the batch sizes and the names of the candidates.

    Raises:
        UserError: a value that cannot be run.
    """
    precision = arguments.precision or ("fp32" if arguments.check else "bf16")
    learning_rate = CHECKED_LEARNING_RATE if arguments.check else TIMED_LEARNING_RATE
    sizes_of_model = (arguments.layers, arguments.hidden, arguments.seq_length, arguments.micro_batch_size)
    settings = Settings(*sizes_of_model, precision, learning_rate)
    text = arguments.batches or (CHECKED_BATCHES if arguments.check else TIMED_BATCHES)
    try:
        sizes = [int(size) for size in text.split(",")]
    except ValueError:
        raise UserError(f"--batches {text}: whole numbers with commas between, such as {TIMED_BATCHES}") from None
    names = list(PEERS) if arguments.only is None else arguments.only.split(",")
    unknown = [name for name in names if name not in PEERS]
    problems = [
        (
            arguments.json is not None and find_spec("matplotlib") is None,
            "--json draws a picture, too, which needs matplotlib: pip install 'megastable[plot]'",
        ),
        (arguments.rounds < 1, f"--rounds {arguments.rounds}: at least 1"),
        (arguments.layers < 2 * NUM_STAGES, f"--layers {arguments.layers}: at least {2 * NUM_STAGES}, for torch ZBV"),
        (arguments.micro_batch_size < 1, f"--micro-batch-size {arguments.micro_batch_size}: at least 1"),
        (
            any(size < 1 or size % max(arguments.micro_batch_size, 1) for size in sizes),
            f"--batches {text}: multiples of the micro-batch size {arguments.micro_batch_size}",
        ),
        (bool(unknown), f"--only {arguments.only}: {unknown} are no candidates; there are {', '.join(PEERS)}"),
        (arguments.check and precision != "fp32", f"--check --precision {precision}: it compares in fp32"),
        (arguments.check and LIMIT not in names, f"--only {arguments.only}: --check compares with {LIMIT!r}"),
    ]
    for wrong, message in problems:
        if wrong:
            raise UserError(message)
    if arguments.json is not None:
        taken = [path for path in output_paths(arguments.json) if path.exists()]
        if taken:
            raise UserError(f"--json {arguments.json}: {taken[0]} is there already; name another file")
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
    return settings, sizes, names


def output_paths(path: Path) -> tuple[Path, Path, Path]:
    """Return the files of step times, tables and picture."""
    return path, path.with_suffix(".md"), path.with_suffix(".png")


def hardware() -> dict[str, Any]:
    """Describe the machine, as far as a reader needs it to place the numbers."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = []
    if cpuinfo.exists():
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    return {
        "cpu": facts.get("model name", "an unknown processor"),
        "cores": usable_cpus(),
        "bf16": " ".join(flag for flag in ("avx512_bf16", "amx_bf16") if flag in facts.get("flags", "").split()),
        "load": os.getloadavg()[0],
        "torch": torch.__version__,
        "deepspeed": version("deepspeed"),
    }


def refusals(trainer: Trainer, settings: Settings, sizes: list[int]) -> dict[int, str]:
    """Return, by global batch size, why the candidate cannot train on it."""
    reasons = {size: trainer.refusal(size // settings.micro_batch_size) for size in sizes}
    return {size: reason for size, reason in reasons.items() if reason}


def stock_bounds(trainers: dict[str, Trainer]) -> dict[str, list[int]]:
    """Return, by candidate, where stock DeepSpeed cuts by itself."""
    return {name: trainer.bounds for name, trainer in trainers.items() if isinstance(trainer, StockDeepSpeed)}


def check(trainers: dict[str, Trainer], settings: Settings, sizes: list[int], rounds: int, rank: int) -> int:
    """Compare the loss curves; returns the exit code, 1 where one of them differs."""
    differences = largest_differences(trainers, settings, sizes, rounds)
    if rank == 0:
        print(f"largest relative difference of the loss from one process, {rounds} steps at each of {sizes}, fp32:")
        for name, difference in differences.items():
            verdict = "" if difference <= TOLERANCE else f"  ABOVE {TOLERANCE:g}"
            print(f"  {name:16} {difference:.1e}{verdict}")
    return int(not all(difference <= TOLERANCE for difference in differences.values()))


def time_steps(
    trainers: dict[str, Trainer], settings: Settings, sizes: list[int], arguments: argparse.Namespace,
    facts: dict[str, Any], rank: int,
) -> None:  # fmt: skip
    """Measure, print the tables, and write what was asked for."""

    def report(row: dict[str, Any]) -> None:
        if rank == 0:
            seconds = ", ".join(f"{name} {value:.3f}" for name, value in row["seconds"].items())
            print(f"round {row['round']}, batch {row['global_batch_size']}: {seconds}", file=sys.stderr, flush=True)

    result: dict[str, Any] = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "hardware": hardware(),
        "num_stages": NUM_STAGES,
        **facts,
    }
    deadline = time.monotonic() + 60 * arguments.time_limit
    result["rows"] = measure(trainers, settings, sizes, arguments.rounds, deadline, report)
    if not result["rows"]:
        raise UserError(f"--time-limit {arguments.time_limit:g}: the warm-up alone took longer; nothing was measured")
    if rank != 0:
        return
    if arguments.json is not None:
        data, tables, picture = output_paths(arguments.json)
        data.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        tables.write_text(markdown(result), encoding="utf-8")
        draw(result, picture)
    print(markdown(result))


def main() -> int:
    """Build the candidates on this rank, then check or time them."""
    arguments = parse_arguments()
    launch = Launch.detect(os.environ)
    try:
        settings, sizes, names = read_settings(arguments)
        if launch.world_size != NUM_STAGES:
            raise UserError(f"{launch.world_size} process(es): launch {NUM_STAGES}, as --help shows")
        if get_accelerator().device_name() != "cpu":
            raise UserError("this compares processes on a CPU; set DS_ACCELERATOR=cpu")
        # A process that waits for another that hangs or has died would wait for ever.
        faulthandler.dump_traceback_later(60 * arguments.time_limit + GRACE_SECONDS, exit=True)
        torch.set_num_threads(1)
        with connected(launch):
            bounds = own_bounds(settings)
            trainers = {name: PEERS[name](settings, bounds) for name in names}
            refused = {name: refusals(trainer, settings, sizes) for name, trainer in trainers.items()}
            refused = {name: reasons for name, reasons in refused.items() if reasons}
            if arguments.check:
                if refused:
                    raise UserError(f"--batches {sizes}: --check compares what all candidates can train; {refused}")
                return check(trainers, settings, sizes, arguments.rounds, launch.rank)
            all_bounds = {OWN: bounds, **stock_bounds(trainers)}
            facts = {"settings": vars(settings), "bounds": all_bounds, "refused": refused}
            time_steps(trainers, settings, sizes, arguments, facts, launch.rank)
        return 0
    except UserError as error:
        if launch.rank == 0:
            print(f"run.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    run_script(main)
