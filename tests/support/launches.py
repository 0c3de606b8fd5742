"""Starting launch/train.py as a user does: by the deepspeed command, torchrun, SLURM's variables, or alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.support.ranks import CPU_ONLY, REPOSITORY
from tests.support.tiny_run import run_dict

TRAIN = ["launch/train.py"]
DEEPSPEED = [str(Path(sys.executable).with_name("deepspeed")), "--num_gpus", "2"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]

TIMED = {
    "step_seconds", "tokens_per_second", "tflops_per_device", "hardware_tflops_per_device", "slowest_rank",
    "slowest_rank_share", "stage_busy_seconds", "host_memory_gib", "consistency_seconds", "snapshot_seconds",
}  # fmt: skip
"""Metrics that differ between two runs of the same steps."""


def write_run_file(folder: Path, **changes: Any) -> Path:
    """Write a tiny run file on a text of its own: about 40 samples an epoch, tokenised into a cache of its own."""
    text = folder / "text"
    text.mkdir(parents=True, exist_ok=True)
    for number in range(8):
        words = (f"line {line} of file {number} says {line * number % 17}" for line in range(4))
        (text / f"{number}.txt").write_text("\n".join(words))
    data = {
        "source": {"type": "text", "path": str(text)},
        "tokenizer": {"type": "bytes"},
        "validation_fraction": 0.2,
        "cache_dir": str(folder / "cache"),
    }
    common = {"megastable__data": data, "megastable__pipeline__num_stages": 2, "megastable__logging": {"interval": 1}}
    path = folder / "tiny.json"
    path.write_text(json.dumps(run_dict(**common, **changes)))
    return path


def train_command(launcher: list[str], run_file: Path, run_dir: Path, *flags: str) -> list[str]:
    """Return the command line of a run; with an empty ``launcher`` that of one rank, for ``run_script``."""
    return [*launcher, *TRAIN, "--deepspeed_config", str(run_file), "--run-dir", str(run_dir), *flags]


def start(command: list[str], environment: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """Start a launch in a process group of its own; output and errors come together in ``stdout``."""
    variables = {**os.environ, **CPU_ONLY, **(environment or {})}
    return subprocess.Popen(
        command, cwd=REPOSITORY, env=variables, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Return the rows of a run so far; a line that is just being written is left out."""
    path = run_dir / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def untimed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of a run without what a clock has part in."""
    return [{key: value for key, value in row.items() if key not in TIMED} for row in rows]


def wait_for_step(process: subprocess.Popen[str], run_dir: Path, step: int, timeout_seconds: float = 120) -> None:
    """Return once the run has done ``step`` steps."""
    deadline = time.monotonic() + timeout_seconds
    while len(metrics(run_dir)) < step:
        assert process.poll() is None, process.communicate()[0][-4000:]
        assert time.monotonic() < deadline, f"step {step} was not reached within {timeout_seconds} s"
        time.sleep(0.05)


def assert_holds_no_run(run_dir: Path) -> None:
    """Fail where a process that ended at once has left more than its lock, which blocks nobody once it is dead."""
    assert not run_dir.exists() or {path.name for path in run_dir.iterdir()} <= {"run.lock"}
