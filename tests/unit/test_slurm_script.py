"""launch/slurm.sbatch with stand-ins for SLURM's own commands: what it starts, passes on and queues again."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "launch" / "slurm.sbatch"
TIME_LIMIT_SECONDS = 60
SRUN = """#!/bin/bash
trap 'echo "srun got USR1" >> "$LOG"; sleep 0.5; exit 75' USR1
printf '%s|' srun "$@" >> "$LOG"; echo >> "$LOG"
[ -n "$CODE" ] && exit "$CODE"
for i in $(seq 600); do sleep 0.1; done
"""
SCONTROL = """#!/bin/bash
echo "scontrol $*" >> "$LOG"
"""


class Job:
    """Is the batch script in a shell, with stand-ins that log what they are called with."""

    def __init__(self, folder: Path, code: str, *arguments: str) -> None:
        for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
            path = folder / name
            path.write_text(text)
            path.chmod(0o755)
        self.log = folder / "log"
        self.log.touch()
        environment = {
            **os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "LOG": str(self.log), "CODE": code,
            "SLURM_JOB_ID": "123",
        }  # fmt: skip
        self.shell = subprocess.Popen(["bash", str(SCRIPT), *arguments], env=environment)

    def wait_for(self, text: str) -> None:
        """Wait until a stand-in has logged the text."""
        deadline = time.monotonic() + TIME_LIMIT_SECONDS
        while text not in self.log.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def end(self) -> tuple[int, list[str]]:
        """Return the exit code and the log."""
        return self.shell.wait(timeout=TIME_LIMIT_SECONDS), self.log.read_text().splitlines()


def test_it_is_a_shell_script() -> None:
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True, timeout=TIME_LIMIT_SECONDS)


@pytest.mark.parametrize(("code", "requeued"), [("0", False), ("2", False), ("3", False), ("75", True), ("76", False)])
def test_only_a_run_that_has_saved_is_queued_again(tmp_path: Path, code: str, requeued: bool) -> None:
    exit_code, log = Job(tmp_path, code, "a file.json", "--set", "x=a b").end()
    assert exit_code == int(code)
    assert "|launch/train.py|--deepspeed_config|a file.json|--resume=auto|--set|x=a b|" in log[0]
    assert log[1:] == (["scontrol requeue 123"] if requeued else [])


def test_the_signal_before_the_limit_is_passed_on_and_waited_for(tmp_path: Path) -> None:
    job = Job(tmp_path, "", "run.json")
    job.wait_for("srun|")
    time.sleep(0.3)
    os.kill(job.shell.pid, signal.SIGUSR1)
    exit_code, log = job.end()
    assert exit_code == 75
    assert log[1:] == ["srun got USR1", "scontrol requeue 123"]
