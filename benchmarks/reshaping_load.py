"""The memory that a load takes beside the state that it fills, where the checkpoint is of another layout.

  torchrun --standalone --nproc_per_node 4 benchmarks/reshaping_load.py save /scratch/c --stages 2
  torchrun --standalone --nproc_per_node 1 benchmarks/reshaping_load.py load /scratch/c

The processes beyond the stages are replicas. Give both lines the same sizes. Printed is, for every process of the load,
the most that its resident memory was above what it was before: all of it, and the anonymous part, which no file backs
and the kernel cannot drop; beside the state of one block, 12 bytes for each of its parameters. Linux only.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from small_runs import build_engine, model_parser, small_run

from megastable.checkpoints.folder import folder_name
from megastable.checkpoints.manifest import read_manifest
from megastable.config.training import CheckpointConfig
from megastable.core.errors import UserError
from megastable.core.launch import Launch
from megastable.core.records import TrainingState
from megastable.core.scripts import Parser, run_script
from megastable.engine.checkpoint import RunRecord, load_checkpoint
from megastable.engine.checkpoint_writer import CheckpointWriter
from megastable.engine.process_group import connected
from megastable.engine.training_engine import TrainingEngine
from megastable.planning.run_plan import RunPlan

SAMPLE_SECONDS = 0.0005
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
BYTES_OF_A_PARAMETER = 12


@dataclass(frozen=True)
class Extra:
    """The most bytes above what was resident before."""

    resident: int
    anonymous: int


def build(arguments: argparse.Namespace, num_stages: int) -> tuple[RunPlan, TrainingEngine]:
    """Build the engine of a small run whose processes are stages and replicas; collective."""
    batch = 2 * dist.get_world_size() // num_stages
    run = small_run(arguments, batch, pipeline={"num_stages": num_stages})
    plan = RunPlan.of(run, dist.get_world_size())
    return plan, build_engine(plan)


def save(engine: TrainingEngine, checkpoints: Path) -> None:
    """Save the engine's state as that of step 1; collective.

    Raises:
        UserError: it could not be written.
    """
    writer = CheckpointWriter(checkpoints, engine.model_state, engine.layout, CheckpointConfig(asynchronous=False))
    writer.save(RunRecord(TrainingState(step=1), {}, "", {}, loss=None, eval_loss=None))
    (outcome,) = writer.outcomes()
    if outcome.fault is not None:
        raise UserError(f"no checkpoint could be written: {outcome.fault}")


def extra_of_load(engine: TrainingEngine, checkpoints: Path) -> Extra:
    """Load the checkpoint of step 1, and measure what that takes beside the engine's own state; collective."""
    folder = checkpoints / folder_name(1)
    manifest = read_manifest(folder)
    # What a fresh engine has not touched yet is its own memory, and no cost of the load.
    for group in engine.model_state.flats():
        for flat in group.values():
            flat.add_(1)
    return extra_of(lambda: load_checkpoint(folder, manifest, engine.model_state, engine.layout, seed=1))


def extra_of(act: Callable[[], object]) -> Extra:
    """Measure the most memory that ``act`` takes in this process."""
    gc.collect()
    # Freed blocks that the process keeps would serve unseen.
    ctypes.CDLL(None).malloc_trim(0)
    resident_before, anonymous_before = resident_and_anonymous()
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    most_anonymous = [anonymous_before]
    done = threading.Event()

    def sample() -> None:
        while not done.wait(SAMPLE_SECONDS):
            most_anonymous[0] = max(most_anonymous[0], resident_and_anonymous()[1])

    sampler = threading.Thread(target=sample)
    sampler.start()
    act()
    done.set()
    sampler.join()
    return Extra(high_water_mark() - resident_before, most_anonymous[0] - anonymous_before)


def resident_and_anonymous() -> tuple[int, int]:
    """Return the bytes of this process in memory, and those of them that no file backs."""
    _, resident, of_files, *_ = (int(word) for word in Path("/proc/self/statm").read_text().split())
    return resident * PAGE_BYTES, (resident - of_files) * PAGE_BYTES


def high_water_mark() -> int:
    """Return the most bytes in memory since the mark began anew."""
    status = Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def block_bytes(arguments: argparse.Namespace) -> int:
    """Return the bytes of one block's state in a checkpoint."""
    num_parameters = 12 * arguments.hidden**2 + 13 * arguments.hidden
    return BYTES_OF_A_PARAMETER * num_parameters


def main() -> None:
    """Save or load, and print a line for each process of a load."""
    sizes = model_parser(None, hidden=512, seq_length=64)
    parser = Parser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, parents=[sizes], add_help=False
    )
    parser.add_argument("act", choices=("save", "load"))
    parser.add_argument("checkpoints", type=Path, help="folder of the checkpoint")
    parser.add_argument("--stages", type=int, default=1, help="pipeline stages; the other processes are replicas")
    arguments = parser.parse_args()
    launch = Launch.detect(os.environ)
    with connected(launch):
        plan, engine = build(arguments, arguments.stages)
        if arguments.act == "save":
            save(engine, arguments.checkpoints)
            return
        extra = extra_of_load(engine, arguments.checkpoints)
        block = block_bytes(arguments)
        print(
            f"{plan.layout.describe(launch.rank)}: {extra.resident / 2**20:.1f} MiB more, of these anonymous "
            f"{extra.anonymous / 2**20:.1f}; a block has {block / 2**20:.1f}: {extra.resident / block:.2f} of it",
            flush=True,
        )


if __name__ == "__main__":
    run_script(main)
