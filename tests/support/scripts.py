"""Runs a script of the repository on forked ranks, as a launcher would start it but without the seconds of imports.

    finished = run_script(train_command([], run_file, run_dir), world_size=2)
    assert finished.exit_codes == [0, 0], finished.output

What a launcher itself does (ending the others where one rank dies, its own messages) needs the launcher; ``launches``
has the commands.
"""

from __future__ import annotations

import importlib
import random
import shutil
import socket
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from megastable.checkpoints.folder import folder_name, step_folders
from megastable.training.run_folder import RunFolder
from tests.support.launches import DEEPSPEED, TORCHRUN, metrics, train_command
from tests.support.ranks import RANK_WORKER, hosted_store, run_bounded, run_processes, torchrun_variables

Launcher = Literal["torchrun", "deepspeed", "slurm"]
Start = Callable[[Launcher, list[str]], tuple[int, str]]


@dataclass(frozen=True)
class FinishedScript:
    """Holds how the ranks of a script ended, and what each printed; ``None`` is a rank that had to be killed."""

    exit_codes: list[int | None]
    outputs: list[str]

    @property
    def output(self) -> str:
        """Return what all ranks printed, one after the other."""
        return "\n".join(self.outputs)


def run_script(
    words: list[str],
    world_size: int = 1,
    launcher: Launcher = "torchrun",
    timeout_seconds: float = 120,
    environment: dict[str, str] | None = None,
    first: Callable[..., None] | None = None,
    **arguments: Any,
) -> FinishedScript:
    """Run a script on every rank; the first that fails ends the others, and so does the time limit.

    Args:
        words: the script, relative to the repository, and its arguments.
        launcher: whose variables the ranks get.
        environment: further variables, over those of the launcher.
        first: a function of a module that every rank calls with ``arguments`` before the script, such as one that adds
            to a registry. It is found by name, so that it has to be at the top of its module.
    """
    called = None if first is None else (first.__module__, first.__qualname__, arguments)
    with hosted_store() as port, tempfile.TemporaryDirectory() as path:
        outputs = [Path(path) / f"output_{rank}.txt" for rank in range(world_size)]
        job = _job_with_free_port()
        targets = []
        for rank, output in enumerate(outputs):
            output.touch()
            variables = {
                "torchrun": torchrun_variables(rank, world_size, port),
                "deepspeed": _deepspeed_variables(rank, world_size),
                "slurm": _slurm_variables(rank, world_size, job),
            }[launcher]
            # The deepspeed command appends an option of its own to those of the script.
            rank_words = [words[0], f"--local_rank={rank}", *words[1:]] if launcher == "deepspeed" else words
            targets.append((_run_script, (rank_words, output, {**variables, **(environment or {})}, called)))
        exit_codes = run_processes(targets, timeout_seconds)
        return FinishedScript(exit_codes, [output.read_text(errors="replace") for output in outputs])


def train_and_resume(
    run_file: Path,
    folder: Path,
    resume_after: int,
    world_size: int = 1,
    first: Callable[..., None] | None = None,
    **arguments: Any,
) -> tuple[Path, Path]:
    """Train a run to its end, and once more from its checkpoint of step ``resume_after``; returns both run folders.

    In every process ``first(**arguments)`` is called before the run, for example to add to a registry.
    """
    whole = folder / "whole"
    resumed = folder / "resumed"
    finished = run_script(train_command([], run_file, whole), world_size, first=first, **arguments)
    assert finished.exit_codes == [0] * world_size, finished.output
    shutil.copytree(whole, resumed)
    assert (resumed / "checkpoints" / folder_name(resume_after)).is_dir(), "the run saved nothing at this step"
    for checkpoint in step_folders(resumed / "checkpoints"):
        if checkpoint.name > folder_name(resume_after):  # steps of one number of digits
            shutil.rmtree(checkpoint)
    RunFolder(resumed).drop_lines_after(resume_after)
    finished = run_script(train_command([], run_file, resumed, "--resume"), world_size, first=first, **arguments)
    assert finished.exit_codes == [0] * world_size, finished.output
    assert len(metrics(resumed)) == len(metrics(whole))
    return whole, resumed


def start_forked(launcher: Launcher, words: list[str]) -> tuple[int, str]:
    """Run a script on two forked ranks; returns an exit code as the launcher would, and what was printed."""
    finished = run_script(words, world_size=2, launcher=launcher, timeout_seconds=240)
    return int(finished.exit_codes != [0, 0]), finished.output


def start_launched(launcher: Launcher, words: list[str]) -> tuple[int, str]:
    """Run a script on two ranks of the real launcher; returns its exit code and what was printed."""
    command = {"deepspeed": DEEPSPEED, "torchrun": TORCHRUN}[launcher]
    finished = run_bounded([*command, *words], 240)
    return finished.returncode, finished.stdout


STARTS = [
    pytest.param(start_forked, id="forked"),
    pytest.param(start_launched, id="launched", marks=pytest.mark.slow),
]
"""Two ways to start a script on two ranks: for the default run of the tests, and for the full matrix."""


def _run_script(*arguments: Any) -> None:
    # Imported here, so that a test process does not load DeepSpeed.
    importlib.import_module(RANK_WORKER).run_script(*arguments)


def _deepspeed_variables(rank: int, world_size: int) -> dict[str, str]:
    """Return what the deepspeed command tells a rank: the same port in every launch, which no run may use."""
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500",
    }  # fmt: skip


def _slurm_variables(rank: int, world_size: int, job: int) -> dict[str, str]:
    """Return what srun tells a task of a job on one node."""
    return {
        "SLURM_NTASKS": str(world_size), "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "localhost",
        "SLURM_JOB_ID": str(job), "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank),
        "SLURM_STEP_ID": "0",
    }  # fmt: skip


def _job_with_free_port() -> int:
    """Find a number of a SLURM job whose port, which a run takes from the number, is free."""
    while True:
        job = random.randrange(10_000)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", 20_000 + job)) != 0:
                return job
