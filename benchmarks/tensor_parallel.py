"""What splitting layers over two processes costs and saves, side by side: data 2, tensor 2, tensor 2 with slices.

Run it with `torchrun --standalone --nproc_per_node 2 benchmarks/tensor_parallel.py`.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from small_runs import LEARNING_RATE, build_engine, model_parser, random_micro_batches, small_run
from torch import Tensor

from megastable.core.launch import Launch
from megastable.core.scripts import run_script
from megastable.engine.process_group import connected
from megastable.engine.tensor_group import ProcessTensorGroup
from megastable.engine.training_engine import TrainingEngine
from megastable.model.tensor_parallel import Work
from megastable.planning.run_plan import RunPlan

LAYOUTS = {
    "data 2": {"size": 1},
    "tensor 2": {"size": 2},
    "tensor 2, slices": {"size": 2, "sequence_parallel": True},
}


class TimedWork:
    """A collective whose waiting time is added up."""

    def __init__(self, work: Work, seconds: dict[str, float]) -> None:
        self._work = work
        self._seconds = seconds

    def wait(self) -> None:
        """Wait, and count how long."""
        started = time.perf_counter()
        self._work.wait()
        self._seconds["tensor"] += time.perf_counter() - started


def time_collectives(seconds: dict[str, float]) -> None:
    """Add the waiting time of every tensor collective of this process to ``seconds``."""

    def timed(start: Callable[..., Any]) -> Callable[..., Any]:
        def started(self: ProcessTensorGroup, x: Tensor) -> Any:
            result = start(self, x)
            if isinstance(result, tuple):
                return result[0], TimedWork(result[1], seconds)
            return TimedWork(result, seconds)

        return started

    for name in ("start_all_reduce", "start_gather", "start_reduce_scatter"):
        setattr(ProcessTensorGroup, name, timed(getattr(ProcessTensorGroup, name)))


def saved_megabytes(engine: TrainingEngine, plan: RunPlan) -> float:
    """Count what one micro-batch leaves behind for its backward pass on this rank, but for the parameters."""
    storages: dict[int, int] = {}
    parameters = {parameter.untyped_storage().data_ptr() for parameter in engine.deepspeed.module.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids, _ = next(random_micro_batches(plan))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hidden = engine.deepspeed.module(ids)
    del hidden
    return sum(storages.values()) / 2**20


def main() -> None:
    """Time the layouts in turns and print a table."""
    parser = model_parser(__doc__, hidden=256, seq_length=256, num_ranks=2)
    parser.add_argument("--rounds", type=int, default=8, help="steps of each layout, in turns")
    arguments = parser.parse_args()
    seconds: dict[str, float] = defaultdict(float)
    time_collectives(seconds)
    launch = Launch.detect(os.environ)
    with connected(launch):
        engines = {}
        for name, tensor in LAYOUTS.items():
            run = small_run(arguments, batch=8, tensor_parallel=tensor)
            plan = RunPlan.of(run, launch.world_size)
            engines[name] = plan, build_engine(plan)
        saved = {name: saved_megabytes(engine, plan) for name, (plan, engine) in engines.items()}
        steps: dict[str, list[float]] = defaultdict(list)
        shares: dict[str, list[float]] = defaultdict(list)
        for turn in range(arguments.rounds + 1):
            for name, (plan, engine) in engines.items():
                seconds["tensor"] = 0.0
                engine.rampup_hook.before_step(0)
                result = engine.train_batch(random_micro_batches(plan), LEARNING_RATE)
                if turn > 0:  # the first step of each sets things up
                    steps[name].append(result.step_seconds)
                    shares[name].append(seconds["tensor"] / result.step_seconds)
        if launch.rank == 0:
            print_table(steps, shares, saved)


def print_table(steps: dict[str, list[float]], shares: dict[str, list[float]], saved: dict[str, float]) -> None:
    """Print a row for every layout; ratios are medians over the rounds."""
    print("| layout | step, ratio to data 2 | waiting for tensor ranks | saved by a micro-batch of 2, MB a process |")
    print("|---|---|---|---|")
    for name, times in steps.items():
        ratio = statistics.median(own / base for own, base in zip(times, steps["data 2"], strict=True))
        print(f"| {name} | {ratio:.2f} | {statistics.median(shares[name]):.0%} | {saved[name]:.1f} |")


if __name__ == "__main__":
    run_script(main)
