"""One round: a run that dies, is resumed on another layout, dies again or not, and comes to its end."""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from faults.judge import Reference, Verdict, judge
from faults.moments import Moment, choose_moment, left_by_a_save
from faults.ranks import Ranks, start_ranks, wait_until
from faults.samples import begun_steps, record_samples

from megastable.checkpoints.folder import step_folders, step_of
from megastable.core.layout import ParallelLayout
from megastable.core.run_paths import RunPaths

FIRST_LAYOUT = ParallelLayout(2, 2)
LAYOUTS = (
    ParallelLayout(1, 1), ParallelLayout(2, 1), ParallelLayout(1, 2), ParallelLayout(2, 2), ParallelLayout(4, 1),
    ParallelLayout(1, 4), ParallelLayout(2, 1, 2), ParallelLayout(1, 2, 2),
)  # fmt: skip
POLL_SECONDS = 0.001
"""Between two looks at whether the moment has come: the parts of a save take some milliseconds."""
MOST_DEATHS = 3
SHARE_OF_FURTHER_DEATHS = 0.4
SAVE_INTERVAL = 2
KEEP_LAST = 2
TOTAL_STEPS = 12
RUN: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
    "megastable": {
        "model": {
            "num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 16, "vocab_size": 300,
            "vocab_padding_multiple": 16,
        },
        "pipeline": {"num_stages": 2},
        "batch_rampup": {"start": 4, "increment": 4, "final": 8, "samples_per_increment": 16},
        "lr_schedule": {"type": "cosine", "warmup": 8, "min_lr": 0.0001},
        "training": {"total_steps": TOTAL_STEPS, "eval_interval": 4, "eval_samples": 4, "seed": 7},
        "checkpoint": {"save_interval": SAVE_INTERVAL, "keep_last": KEEP_LAST},
        "logging": {"interval": 1},
    },
}  # fmt: skip


@dataclass
class Start:
    """What became of one start of a run."""

    layout: str
    killed_rank: int | None = None
    """None where nobody was killed: it came to its end."""
    moment: str = ""
    """When the rank was killed."""
    left_by_a_save: list[str] = field(default_factory=list)
    had_to_be_killed: int = 0
    """Ranks that did not end by themselves once another was dead and they were told to stop."""

    def __str__(self) -> str:
        if self.killed_rank is None:
            return f"{self.layout} to the end"
        inside = ", INSIDE A SAVE" if self.left_by_a_save else ""
        return f"{self.layout} rank {self.killed_rank} killed {self.moment}{inside}"


@dataclass
class Round:
    """What became of one run."""

    starts: list[Start]
    verdict: Verdict
    seconds: float
    failure: str = ""
    """Why the run did not come to its end; then it could not be judged."""

    @property
    def faults(self) -> list[str]:
        """Return every fault; none of a good round."""
        failed = [f"FAILED: {self.failure}"] if self.failure else []
        lost = [f"LOST: {text}" for text in self.verdict.lost]
        wrong = [f"WRONG: {text}" for text in self.verdict.wrong]
        return [*failed, *lost, *wrong]

    def __str__(self) -> str:
        starts = "; ".join(map(str, self.starts))
        outcome = "FAULTS" if self.faults else "good"
        summary = f"{starts}: {outcome}, differences up to {self.verdict.largest_difference:.0e}, {self.seconds:.0f} s"
        return "\n  ".join([summary, *self.faults])


class RunFailedError(Exception):
    """Says that a start of the run failed, or took too long, although nobody was killed."""


def write_run_file(folder: Path) -> Path:
    """Write the run file, on a text of its own; the text is tokenised into a cache of its own."""
    text = folder / "text"
    text.mkdir(parents=True)
    for number in range(8):
        words = (f"line {line} of file {number} says {line * number % 17}" for line in range(6))
        (text / f"{number}.txt").write_text("\n".join(words), encoding="utf-8")
    data = {
        "source": {"type": "text", "path": str(text)}, "tokenizer": {"type": "bytes"}, "validation_fraction": 0.2,
        "cache_dir": str(folder / "cache"),
    }  # fmt: skip
    path = folder / "run.json"
    path.write_text(json.dumps({**RUN, "megastable": {**RUN["megastable"], "data": data}}), encoding="utf-8")
    return path


def in_words(layout: ParallelLayout) -> str:
    """Return ``2x2`` for two stages and two replicas, and ``2x1 tensor 2`` with tensor ranks."""
    tensor = f" tensor {layout.tensor_parallel_size}" if layout.tensor_parallel_size > 1 else ""
    return f"{layout.num_stages}x{layout.data_parallel_size}{tensor}"


def start_run(run_file: Path, run_dir: Path, layout: ParallelLayout, folder: Path) -> Ranks:
    """Start the run, or what is left of it, with the line that a job script would have."""
    words = [
        "launch/train.py", "--deepspeed_config", str(run_file), "--run-dir", str(run_dir), "--resume=auto",
        "--set", f"megastable.pipeline.num_stages={layout.num_stages}",
        "--set", f"megastable.tensor_parallel.size={layout.tensor_parallel_size}",
    ]  # fmt: skip
    return start_ranks(words, layout.world_size, folder, record_samples)


def wait_for_end(ranks: Ranks, limit_seconds: float) -> None:
    """Wait until a start that nobody kills has come to its end.

    Raises:
        RunFailedError: it failed or is not over in time; what the ranks printed is in the message.
    """
    if not ranks.wait(limit_seconds):
        raise RunFailedError(f"a start took more than {limit_seconds:g} s\n{ranks.output()}")
    if any(ranks.exit_codes):
        raise RunFailedError(f"a start failed with the exit codes {ranks.exit_codes}\n{ranks.output()}")


class Rounds:
    """Plays rounds of one run file against the reference.

    Args:
        folder: for runs; that of a round without a fault is left to the caller to delete.
        limit_seconds: of one start.
    """

    def __init__(self, run_file: Path, reference: Reference, limit_seconds: float) -> None:
        self._run_file = run_file
        self._reference = reference
        self._limit_seconds = limit_seconds
        rows = reference.rows
        self._consumed_samples = dict(zip((row["step"] for row in rows), sorted(reference.samples), strict=True))

    def play(self, folder: Path, rng: random.Random) -> Round:
        """Let a run die and resume in ``folder``, as ``rng`` decides, and judge it."""
        started = time.monotonic()
        verdict = Verdict()
        starts: list[Start] = []
        failure = ""
        try:
            for start in self._starts(folder, rng, verdict):
                starts.append(start)
            start_folders = [_folder_of_start(folder, number) for number in range(len(starts))]
            judge(folder / "run", start_folders, self._reference, verdict)
        except RunFailedError as error:
            failure = str(error)
        return Round(starts, verdict, time.monotonic() - started, failure)

    def _starts(self, folder: Path, rng: random.Random, verdict: Verdict) -> Iterator[Start]:
        """Start the run until it comes to its end, and yield what became of each start.

        Raises:
            RunFailedError: a start failed although nobody was killed.
        """
        num_deaths = 1
        while num_deaths < MOST_DEATHS and rng.random() < SHARE_OF_FURTHER_DEATHS:
            num_deaths += 1
        run_dir = folder / "run"
        for number in itertools.count():
            layout = FIRST_LAYOUT if number == 0 else rng.choice(LAYOUTS)
            start = Start(in_words(layout))
            start_folder = _folder_of_start(folder, number)
            newest = newest_published(run_dir)
            ranks = start_run(self._run_file, run_dir, layout, start_folder)
            try:
                # A death after the last save leaves nothing to be killed in.
                if number < num_deaths and newest < TOTAL_STEPS:
                    moment = self._choose_moment(rng, newest, run_dir, start_folder)
                    self._kill(start, ranks, moment, rng, run_dir)
                if start.killed_rank is None:
                    wait_for_end(ranks, self._limit_seconds)
            finally:
                ranks.end()
            verdict.lost += self._steps_lost(run_dir, start_folder, newest)
            yield start
            if start.killed_rank is None:
                return

    def _choose_moment(self, rng: random.Random, newest: int, run_dir: Path, start_folder: Path) -> Moment:
        save_steps = [step for step in range(SAVE_INTERVAL, TOTAL_STEPS + 1, SAVE_INTERVAL) if step > newest]
        checkpoints = RunPaths(run_dir).checkpoints
        return choose_moment(rng, self._consumed_samples, newest + 1, save_steps, checkpoints, start_folder)

    def _kill(self, start: Start, ranks: Ranks, moment: Moment, rng: random.Random, run_dir: Path) -> None:
        """Kill a rank at its moment, unless the run is over before, and end the others as a launcher would."""
        rank = rng.randrange(len(ranks.processes))

        def is_time() -> bool:
            return moment.has_come() or ranks.exit_codes[rank] is not None

        if not wait_until(is_time, self._limit_seconds, POLL_SECONDS):
            raise RunFailedError(f"{moment.name} was not reached in {self._limit_seconds:g} s\n{ranks.output()}")
        time.sleep(moment.delay_seconds)
        if ranks.kill(rank):
            start.killed_rank = rank
            start.moment = moment.name
            start.had_to_be_killed = ranks.end_as_launcher()
            start.left_by_a_save = left_by_a_save(RunPaths(run_dir).checkpoints, KEEP_LAST)

    def _steps_lost(self, run_dir: Path, start_folder: Path, newest_before: int) -> Iterator[str]:
        """Yield what a start has lost of what was safe, or should have been.

        Args:
            newest_before: step of the newest checkpoint that it could begin with.
        """
        begun = [step for step, before in self._consumed_samples.items() if before in begun_steps(start_folder)]
        if not begun:
            return
        if begun[0] != newest_before + 1:
            yield f"{start_folder.name} began with step {begun[0]}, and a checkpoint of step {newest_before} was there"
        # A step begins when the save before it is copied, and that happens when the one before that is published.
        last_copied = (begun[-1] - 1) // SAVE_INTERVAL * SAVE_INTERVAL
        newest = newest_published(run_dir)
        if newest < max(newest_before, last_copied - SAVE_INTERVAL):
            yield f"{start_folder.name} began step {begun[-1]}, and the newest checkpoint is of step {newest}"


def _folder_of_start(folder: Path, number: int) -> Path:
    return folder / f"start_{number}"


def newest_published(run_dir: Path) -> int:
    """Return the step of the newest checkpoint; 0 where there is none."""
    folders = step_folders(RunPaths(run_dir).checkpoints)
    return step_of(folders[0]) if folders else 0
