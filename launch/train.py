#!/usr/bin/env python3
"""Pre-train a GPT: `deepspeed --num_gpus 2 launch/train.py --deepspeed_config ds_configs/quickstart.json`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NoReturn

from megastable.core.scripts import parse_arguments
from megastable.training.entry import refuse_command_line, run_command
from megastable.training.start import RunRequest


class Parser(argparse.ArgumentParser):
    """Refuses a command line once for all ranks of a launch."""

    def error(self, message: str) -> NoReturn:
        """Print the mistake and exit."""
        sys.exit(refuse_command_line(message, self.format_usage()))


def main() -> int:
    """Parse the command line and train."""
    parser = Parser(
        description="Pre-train a GPT on DeepSpeed's pipeline engine, as one JSON file says.",
        epilog="Run it with `deepspeed --num_gpus N`, `torchrun --standalone --nproc_per_node N`, srun or mpirun. "
        "`megastable schema` prints every key of the file with its meaning. SIGTERM, SIGUSR1, SIGINT, SIGHUP and "
        "megastable.training.time_limit let a run save and stop; a second signal ends it at once. Exit codes: 0 done, "
        "1 a rank failed, 2 a mistake in the request, 3 the run has stopped itself, 75 asked to stop and saved "
        "(--resume goes on), 76 asked to stop without a save, 128 + n ended at once by signal n.",
    )
    parser.add_argument(
        "--deepspeed_config", required=True, type=Path, metavar="FILE", help="the run file, e.g. ds_configs/x.json"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides",
        help="override a key of the file by its path, e.g. megastable.training.total_steps=10; repeatable",
    )  # fmt: skip
    parser.add_argument(
        "--run-dir", type=Path, metavar="PATH",
        help="where config.json, metrics.jsonl and checkpoints/ go (default: runs/<name of the file>)",
    )  # fmt: skip
    parser.add_argument(
        "--resume", nargs="?", const=True, default=False, choices=["auto"],
        help="continue the run folder from its newest complete checkpoint, on any layout; --resume=auto also starts "
        "where there is none, so that one line serves the first start and every restart",
    )  # fmt: skip
    parser.add_argument(
        "--load", type=Path, metavar="PATH", help="start a new run folder from this checkpoint, e.g. of another run"
    )
    parser.add_argument(
        "--allow-change", action="append", default=[], metavar="KEY", dest="allowed_changes",
        help="let a key differ from the checkpoint that is fixed by habit, e.g. megastable.training.seed or, for "
        "another text, megastable.data; repeatable",
    )  # fmt: skip
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # deepspeed's launcher appends it
    arguments = parse_arguments(parser)
    return run_command(
        RunRequest(
            run_file=arguments.deepspeed_config,
            overrides=arguments.overrides,
            run_dir=arguments.run_dir,
            resume=arguments.resume,
            load=arguments.load,
            allowed_changes=arguments.allowed_changes,
        )
    )


if __name__ == "__main__":
    sys.exit(main())
