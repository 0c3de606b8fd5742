"""What a save costs: the stall of training and the rate of writing, beside a plain copy and the disk's own rate.

  torchrun --standalone --nproc_per_node 1 benchmarks/checkpoint.py
  torchrun --standalone --nproc_per_node 2 benchmarks/checkpoint.py --folder /scratch --json saves.json

In every round, in turns and with the same bytes: a plain copy of the state to host memory, a save with
megastable.checkpoint.asynchronous, one without, and a plain write to the same folder that is flushed to the disk. A
round's ratios are of neighbours in time, since a shared disk changes its mind from one minute to the next. Every time
is that of the slowest process. The first save allocates the memory that later ones use again; its stall is a line of
its own, beside a plain copy to memory as fresh. The processes are the stages of a pipeline on random weights.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from small_runs import build_engine, model_parser, small_run
from torch import Tensor

from megastable.checkpoints.manifest import read_manifest
from megastable.config.run_config import run_as_dict
from megastable.config.training import CheckpointConfig
from megastable.core.errors import UserError
from megastable.core.launch import Launch
from megastable.core.records import TrainingState
from megastable.core.scripts import Parser, run_script
from megastable.engine.checkpoint import RunRecord
from megastable.engine.checkpoint_writer import CheckpointWriter, SaveOutcome
from megastable.engine.model_state import ModelState
from megastable.engine.process_group import connected
from megastable.engine.tensor_file import CHUNK_BYTES
from megastable.planning.calibration import check_new
from megastable.planning.run_plan import RunPlan

LARGEST_STALL = 1.5
"""The goal: times a plain copy."""
LEAST_RATE = 0.8
"""The goal: of the disk's own rate."""


@dataclass(frozen=True)
class Round:
    """The seconds of what was done in turns."""

    copy: float
    asynchronous_stall: float
    asynchronous: float
    synchronous: float
    plain_write: float


@dataclass(frozen=True)
class Measured:
    """All that was measured; rates are in bytes a second, of all processes together."""

    num_processes: int
    num_parameters: int
    state_bytes: int
    checkpoint_bytes: int
    first_copy_seconds: float
    first_stall_seconds: float
    rounds: list[Round]

    def stalls(self) -> list[float]:
        """Return the stall of every asynchronous save over the plain copy of its round."""
        return [row.asynchronous_stall / row.copy for row in self.rounds]

    def rates(self) -> list[float]:
        """Return how fast every synchronous save was written, over the disk's own rate in its round."""
        share = self.checkpoint_bytes / self.state_bytes
        return [share * row.plain_write / row.synchronous for row in self.rounds]


class Saves:
    """Saves the state of an engine again and again, and leaves nothing of it in the folder."""

    def __init__(self, folder: Path, plan: RunPlan, state: ModelState, asynchronous: bool) -> None:
        self._run = run_as_dict(plan.run)
        self._step = 0
        self._writer = CheckpointWriter(folder, state, plan.layout, CheckpointConfig(asynchronous=asynchronous))

    def save(self) -> tuple[SaveOutcome, int, int]:
        """Save once; return how it went, the bytes of the checkpoint, and the parameters in it; collective.

        Raises:
            UserError: it could not be written.
        """
        self._step += 1
        state = TrainingState(step=self._step)
        self._writer.save(RunRecord(state, self._run, "", {}, loss=None, eval_loss=None))
        self._writer.wait()
        (outcome,) = self._writer.outcomes()
        if outcome.fault is not None:
            raise UserError(f"no checkpoint could be written: {outcome.fault}")
        num_bytes = sum(path.stat().st_size for path in outcome.folder.iterdir())
        tensors = read_manifest(outcome.folder).tensors
        num_parameters = sum(math.prod(tensor.shape) for tensor in tensors.values())
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(outcome.folder)
        dist.barrier()
        return outcome, num_bytes, num_parameters


def measure(plan: RunPlan, state: ModelState, folder: Path, num_rounds: int) -> Measured:
    """Do everything in turns; collective."""
    live = [tensor for group in state.flats() for tensor in group.values()]
    with_copy = Saves(folder / "asynchronous", plan, state, asynchronous=True)
    without = Saves(folder / "synchronous", plan, state, asynchronous=False)
    copies: list[Tensor] = []

    def fresh_copy() -> None:
        copies.extend(torch.empty_like(tensor, device="cpu").copy_(tensor) for tensor in live)

    def copy() -> None:
        for target, tensor in zip(copies, live, strict=True):
            target.copy_(tensor)

    first_copy_seconds = slowest_seconds(fresh_copy)
    first, checkpoint_bytes, num_parameters = with_copy.save()
    without.save()  # as for the other kind, the first is not counted
    rounds = []
    for _ in range(num_rounds):
        copy_seconds = slowest_seconds(copy)
        beside, _, _ = with_copy.save()
        waited_for, _, _ = without.save()
        written = slowest_seconds(lambda: write_plainly(folder / f"plain_{dist.get_rank()}", live))
        (folder / f"plain_{dist.get_rank()}").unlink()
        rounds.append(Round(copy_seconds, slowest(beside.stall_seconds), slowest(beside.seconds),
                            slowest(waited_for.seconds), written))  # fmt: skip
    state_bytes = sum(tensor.nbytes for tensor in live)
    return Measured(
        num_processes=dist.get_world_size(),
        num_parameters=num_parameters,
        state_bytes=sum(gathered(state_bytes)),
        checkpoint_bytes=checkpoint_bytes,
        first_copy_seconds=first_copy_seconds,
        first_stall_seconds=slowest(first.stall_seconds),
        rounds=rounds,
    )


def write_plainly(path: Path, tensors: list[Tensor]) -> None:
    """Write the bytes of ``tensors`` into one file, and flush it to the disk."""
    with open(path, "wb", buffering=0) as file:
        for tensor in tensors:
            content = memoryview(tensor.cpu().numpy().data).cast("B")
            for first in range(0, len(content), CHUNK_BYTES):
                file.write(content[first : first + CHUNK_BYTES])
        os.fsync(file.fileno())


def slowest_seconds(act: Callable[[], object]) -> float:
    """Let all processes act together, and return the seconds of the slowest."""
    dist.barrier()
    started = time.perf_counter()
    act()
    return slowest(time.perf_counter() - started)


def slowest(seconds: float) -> float:
    """Return the most seconds of any process; collective."""
    return float(max(gathered(seconds)))


def gathered(value: Any) -> list[Any]:
    """Return the value of every process; collective."""
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, value)
    return everywhere


def show(measured: Measured) -> None:
    """Print the medians, least and most, beside the goals."""
    rounds = measured.rounds
    print(
        f"{measured.num_parameters:,} parameters on {measured.num_processes} process(es), "
        f"{measured.checkpoint_bytes / 2**20:,.1f} MiB, "
        f"{measured.checkpoint_bytes / measured.num_parameters:.2f} bytes a parameter"
    )
    print(f"{len(rounds)} rounds, median (least to most)")
    for what, seconds in (
        ("plain copy of the state", [row.copy for row in rounds]),
        ("asynchronous save: training waits", [row.asynchronous_stall for row in rounds]),
        ("asynchronous save: until published", [row.asynchronous for row in rounds]),
        ("synchronous save: training waits", [row.synchronous for row in rounds]),
        ("plain write and flush", [row.plain_write for row in rounds]),
    ):
        print(f"  {what:36} {shown(seconds, '.3f')} s")
    megabytes = measured.checkpoint_bytes / 2**20
    print(
        f"  {'written by a synchronous save':36} {shown([megabytes / row.synchronous for row in rounds], '.0f')} MiB/s"
    )
    stalls, rates = measured.stalls(), measured.rates()
    print(f"stall / plain copy: {shown(stalls, '.2f')}; goal: at most {LARGEST_STALL}")
    print(f"rate of writing / the disk's own: {shown(rates, '.2f')}; goal: at least {LEAST_RATE}")
    print(
        f"the first stall, with memory that is fresh: {measured.first_stall_seconds:.3f} s; "
        f"a plain copy to fresh memory: {measured.first_copy_seconds:.3f} s"
    )


def shown(values: list[float], form: str) -> str:
    """Format the median of ``values``, the least and the most."""
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def parse_arguments() -> argparse.Namespace:
    """Read the command line.

    Raises:
        UserError: a value is refused.
    """
    sizes = model_parser(None, hidden=512, seq_length=64)
    parser = Parser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, parents=[sizes], add_help=False
    )
    parser.set_defaults(layers=8)
    parser.add_argument("--rounds", type=int, default=5, help="turns after the first saves (5)")
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to measure; left as it was"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all seconds to a new file")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        raise UserError(f"--rounds {arguments.rounds}: must be at least 1")
    if not arguments.folder.is_dir():
        raise UserError(f"--folder {arguments.folder}: is not a folder")
    if arguments.json is not None:
        check_new(arguments.json)
    return arguments


def main() -> None:
    """Measure together with the other processes; the first one prints and writes."""
    arguments = parse_arguments()
    launch = Launch.detect(os.environ)
    with connected(launch):
        run = small_run(arguments, batch=2, pipeline={"num_stages": launch.world_size})
        plan = RunPlan.of(run, launch.world_size)
        engine = build_engine(plan)
        made = tempfile.mkdtemp(prefix="saves_", dir=arguments.folder) if launch.rank == 0 else ""
        folder = Path(gathered(made)[0])
        try:
            measured = measure(plan, engine.model_state, folder, arguments.rounds)
        finally:
            if launch.rank == 0:
                shutil.rmtree(folder)
        if launch.rank == 0:
            show(measured)
            if arguments.json is not None:
                derived = {"stalls": measured.stalls(), "rates": measured.rates()}
                arguments.json.write_text(json.dumps({**asdict(measured), **derived}, indent=1) + "\n")


if __name__ == "__main__":
    run_script(main)
