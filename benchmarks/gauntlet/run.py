#!/usr/bin/env python3
"""Put one fault into a real run, from outside of the trainer, and score what the trainer makes of it.

  python benchmarks/gauntlet/run.py                                     # all scenarios, about half an hour
  python benchmarks/gauntlet/run.py --only nan_weight,garbage_batch     # some of them
  python benchmarks/gauntlet/run.py --clean                             # ten clean runs: is there a false alarm?
  python benchmarks/gauntlet/run.py --json results.json                 # the table goes beside it, results.md

Each scenario is a run of 120 steps on 2 or 4 CPU processes of a GPT with four blocks, guarded with "rollback", beside
the same run without the fault. A fault is put into live objects (weights, gradients, moments, what a rank reads), sent
as a signal, or stands in the run file; nothing of the trainer is told of it. Scored is, from the run's own events and
what it printed:

  detected   by the first event, or line, that tells of the fault, so many steps after it was injected
  named      the culprit: the layer, rank, samples or key that the fault was put into, and no other
  recovered  the run came to its end, by itself or by --resume=auto, with a final loss within 1% of the clean run's

The same fault is played without a guard ("warn") and under OLMo-core's rule, which skips an update whose loss or norm
is over 6 standard deviations above the mean of the last 128 steps. Exit code: 1 where a scenario is missed or a clean
run raised an alarm, 2 for a mistake on the command line.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megastable.core.scripts import Parser, run_script

# A script's own folder comes first, and this one's modules are a package, because `run` is a script of others, too.
sys.path[0] = str(Path(__file__).parents[1])

from gauntlet.base import Changes  # noqa: E402
from gauntlet.clean import CLEAN_RUNS, CLEAN_STEPS, CleanRun  # noqa: E402
from gauntlet.play import Played, Player, Start  # noqa: E402
from gauntlet.scenario import Scenario  # noqa: E402
from gauntlet.scenarios import SCENARIOS  # noqa: E402
from gauntlet.score import false_alarms, score  # noqa: E402
from gauntlet.table import clean_markdown, markdown  # noqa: E402

LIMIT_SECONDS = 180.0
NO_GUARD: Changes = {"megastable.stability.guard": "warn"}
SKIP: Changes = {"megastable.stability.guard": "skip"}


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="NAME,NAME", help=f"some of the scenarios: {', '.join(SCENARIOS)}")
    parser.add_argument("--clean", action="store_true", help=f"the clean runs of {CLEAN_STEPS} steps instead")
    parser.add_argument(
        "--alone", action="store_true", help="leave out no guard and OLMo-core's rule: a third of the time"
    )
    parser.add_argument(
        "--json", type=Path, metavar="PATH", help="a new file for the scores; the table (.md) beside it"
    )
    parser.add_argument(
        "--start-limit", type=float, default=LIMIT_SECONDS, metavar="SECONDS",
        help=f"a start that takes longer is ended, and its scenario missed ({LIMIT_SECONDS:g})",
    )  # fmt: skip
    parser.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="a new folder in which the runs are made and stay (a temporary one)"
    )
    arguments = parser.parse_args()
    arguments.only = list(SCENARIOS) if arguments.only is None else arguments.only.split(",")
    unknown = [name for name in arguments.only if name not in SCENARIOS]
    if unknown:
        parser.error(f"--only: {', '.join(unknown)} is no scenario; there are {', '.join(SCENARIOS)}")
    if arguments.start_limit <= 0:
        parser.error(f"--start-limit {arguments.start_limit:g}: must be above 0")
    for path in (arguments.json, arguments.keep):
        if path is not None and path.exists():
            parser.error(f"{path} is there already; name another one")
    return arguments


class Gauntlet:
    """Plays scenarios, and each clean run that they are measured by once."""

    def __init__(self, player: Player, alone: bool) -> None:
        self._player = player
        self._alone = alone
        self._clean: dict[str, Played] = {}

    def play(self, scenario: Scenario) -> dict[str, Any]:
        """Play a scenario and its comparisons; returns its row of the results."""
        clean = self._clean_run(scenario)
        played = self._play_faulty(scenario, "guarded", {}, skip_step=False)
        scored = score(scenario, played, clean)
        compared = scenario.compares and not self._alone
        row = {
            **asdict(scored),
            "passed": scored.passed,
            "fault": scenario.fault,
            "recovery": scenario.recovery,
            "seconds": played.seconds,
            "compared": compared,
            "unguarded_final_loss": None,
            "skip_step_final_loss": None,
        }
        if compared:
            row["unguarded_final_loss"] = self._play_faulty(scenario, "unguarded", NO_GUARD, skip_step=False).final_loss
            row["skip_step_final_loss"] = self._play_faulty(scenario, "skip_step", SKIP, skip_step=True).final_loss
        return row

    def _play_faulty(self, scenario: Scenario, how: str, changes: Changes, skip_step: bool) -> Played:
        first = Start({**scenario.changes, **scenario.faulty_changes, **changes}, scenario.name, skip_step)
        if scenario.resumes_on_changes:
            first.changes = {**scenario.changes, **changes}
        starts = [first]
        if scenario.is_resumed:
            starts.append(Start({**scenario.changes, **scenario.faulty_changes, **changes}, None, skip_step))
        return self._player.play(f"{scenario.name}_{how}", scenario.world_size, starts, scenario)

    def _clean_run(self, scenario: Scenario) -> Played:
        key = json.dumps([scenario.world_size, scenario.changes], sort_keys=True)
        if key not in self._clean:
            name = f"clean_{len(self._clean)}"
            self._clean[key] = self._player.play(name, scenario.world_size, [Start(scenario.changes)])
        return self._clean[key]


def play_clean(player: Player, number: int, run: CleanRun) -> dict[str, Any]:
    """Play a clean run; returns its row of the results."""
    played = player.play(f"clean_run_{number}", run.world_size, [Start(run.all_changes)])
    return {
        "name": f"{run.name}, seed {run.seed}",
        "steps": len(played.rows),
        "final_loss": played.final_loss,
        "false_alarms": false_alarms(played),
        "seconds": played.seconds,
        "exit_codes": played.exit_codes,
    }


def play_all(arguments: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Play what is asked for, and yield the rows."""
    player = Player(folder, arguments.start_limit)
    if arguments.clean:
        for number, run in enumerate(CLEAN_RUNS):
            row = play_clean(player, number, run)
            alarms = "; ".join(row["false_alarms"]) or "no alarm"
            print(f"{row['name']}: {row['steps']} steps, {alarms}, {row['seconds']:.0f} s", flush=True)
            yield row
        return
    gauntlet = Gauntlet(player, arguments.alone)
    for name in arguments.only:
        row = gauntlet.play(SCENARIOS[name])
        print(f"{name}: {'passed' if row['passed'] else 'MISSED'}, {row['seconds']:.0f} s", flush=True)
        for key in ("detected_step", "told", "named", "recovered", "final_loss", "clean_final_loss", "exit_codes"):
            print(f"  {key}: {row[key]}", flush=True)
        yield row


def main() -> int:
    """Play and report."""
    arguments = parse_arguments()
    os.environ.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1")
    folder = arguments.keep or Path(tempfile.mkdtemp(prefix="gauntlet-"))
    rows: list[dict[str, Any]] = []
    write = clean_markdown if arguments.clean else markdown
    try:
        for row in play_all(arguments, folder):
            rows.append(row)
            if arguments.json is not None:
                # After every scenario: whoever stops this keeps what was played.
                arguments.json.parent.mkdir(parents=True, exist_ok=True)
                arguments.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
                arguments.json.with_suffix(".md").write_text(write(rows), encoding="utf-8")
    finally:
        if arguments.keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    print(write(rows))
    if arguments.clean:
        return int(any(row["false_alarms"] or row["steps"] != CLEAN_STEPS for row in rows))
    return int(not all(row["passed"] for row in rows))


if __name__ == "__main__":
    run_script(main)
