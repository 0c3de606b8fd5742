#!/usr/bin/env python3
"""Kill ranks of small runs at random moments, resume on random layouts, and judge by the uninterrupted run.

  python benchmarks/faults/run.py                                # 12 rounds, some minutes
  python benchmarks/faults/run.py --rounds 200 --seed 1 --json faults.json

A round is one run of 12 steps, saved every 2, in fp32 without dropout. It begins on 2 stages x 2 replicas. A random
rank is killed (SIGKILL) at a random moment: at the start, in a step, or between the parts of a save. The other ranks
have to end by themselves or by a launcher's SIGTERM. `--resume=auto` then goes on, on a random layout: 1x1, 2x1, 1x2,
2x2, 4x1, 1x4 (stages x replicas), tensor 2 x stages 2, tensor 2 x replicas 2. It may be killed again, up to three times
in all. At the end:

  lost   steps that are missing in metrics.jsonl or stand there twice; a resume that went back further than the newest
         checkpoint; checkpoints that were published and are gone
  wrong  steps whose loss, gradient norm or validation loss is not that of the uninterrupted run to 1e-5 of its size,
         whose counts or learning rate differ, or in which the ranks read other samples; damaged checkpoints

The seed decides layouts, ranks and moments, but not how far a busy machine has come by then. Ranks are forked, as
torchrun starts them. Exit code: 1 where a step is lost or wrong or a run failed, 2 for a mistake on the command line.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megastable.core.scripts import Parser, run_script

# A script's own folder comes first, and this one's modules are a package, because `run` is a script of peers/, too.
sys.path[0] = str(Path(__file__).parents[1])

from faults.judge import Reference, read_reference  # noqa: E402
from faults.rounds import FIRST_LAYOUT, Rounds, RunFailedError, start_run, wait_for_end, write_run_file  # noqa: E402

LIMIT_SECONDS = 120.0


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12, help="runs that die and come back (12)")
    parser.add_argument("--seed", type=int, default=1, help="of layouts, ranks and moments (1)")
    parser.add_argument("--only", type=int, metavar="ROUND", help="play this round of the seed alone")
    parser.add_argument("--json", type=Path, metavar="PATH", help="a new file for what became of every round")
    parser.add_argument(
        "--time-limit", type=float, default=60.0, metavar="MINUTES",
        help="begin no round after this time, and report those that were played (60)",
    )  # fmt: skip
    parser.add_argument(
        "--start-limit", type=float, default=LIMIT_SECONDS, metavar="SECONDS",
        help=f"a start that takes longer hangs, and fails ({LIMIT_SECONDS:g})",
    )  # fmt: skip
    parser.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="keep here the folders of rounds with a fault (a temporary folder)"
    )
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error(f"--rounds {arguments.rounds}: at least 1")
    if min(arguments.time_limit, arguments.start_limit) <= 0:
        parser.error("--time-limit and --start-limit must be above 0")
    if arguments.json is not None and arguments.json.exists():
        parser.error(f"--json {arguments.json}: is there already; name another file")
    return arguments


def play_reference(run_file: Path, folder: Path, limit_seconds: float) -> Reference:
    """Train without interruption."""
    start_folder = folder / "start_0"
    ranks = start_run(run_file, folder / "run", FIRST_LAYOUT, start_folder)
    try:
        wait_for_end(ranks, limit_seconds)
    finally:
        ranks.end()
    return read_reference(folder / "run", start_folder)


def play_rounds(arguments: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Play the rounds, with a line for each; yields what became of them."""
    run_file = write_run_file(folder)
    deadline = time.monotonic() + 60 * arguments.time_limit
    rounds = Rounds(
        run_file, play_reference(run_file, folder / "reference", arguments.start_limit), arguments.start_limit
    )
    numbers = range(1, arguments.rounds + 1) if arguments.only is None else [arguments.only]
    for number in numbers:
        if time.monotonic() > deadline:
            print(f"--time-limit {arguments.time_limit:g}: round {number} is not played any more", file=sys.stderr)
            break
        round_folder = folder / f"round_{number}"
        played = rounds.play(round_folder, random.Random(f"{arguments.seed}/{number}"))
        print(f"round {number}: {played}", flush=True)
        if played.faults and arguments.keep is not None:
            shutil.copytree(round_folder, arguments.keep / round_folder.name, dirs_exist_ok=True)
        shutil.rmtree(round_folder, ignore_errors=True)
        yield {"round": number, **asdict(played), "faults": played.faults}


def summary_of(rows: list[dict[str, Any]], seed: int) -> dict[str, Any]:
    """Add up what became of the rounds."""
    starts = [start for row in rows for start in row["starts"]]
    killed = [start for start in starts if start["killed_rank"] is not None]
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "seed": seed,
        "rounds": len(rows),
        "kills": len(killed),
        "kills_inside_saves": sum(bool(start["left_by_a_save"]) for start in killed),
        "lost": sum(len(row["verdict"]["lost"]) for row in rows),
        "wrong": sum(len(row["verdict"]["wrong"]) for row in rows),
        "failed_runs": sum(bool(row["failure"]) for row in rows),
        "ranks_that_had_to_be_killed": sum(start["had_to_be_killed"] for start in starts),
        "largest_difference": max((row["verdict"]["largest_difference"] for row in rows), default=0.0),
    }


def main() -> int:
    """Play the rounds and report."""
    arguments = parse_arguments()
    os.environ.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        try:
            for row in play_rounds(arguments, Path(folder)):
                rows.append(row)
                if arguments.json is not None:
                    # After every round: whoever stops this keeps what was played.
                    result = {**summary_of(rows, arguments.seed), "rows": rows}
                    arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        except RunFailedError as error:
            print(f"run.py: the uninterrupted run: {error}", file=sys.stderr)
            return 1
    print(", ".join(f"{key} {value}" for key, value in summary_of(rows, arguments.seed).items()))
    return int(any(row["faults"] for row in rows))


if __name__ == "__main__":
    run_script(main)
