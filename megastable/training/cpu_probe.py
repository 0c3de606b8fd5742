"""Measures what a step costs on this CPU, in about ten seconds, on a few of the model's own layers.

As many processes as a launch has here measure at the same time, since they share the memory's bandwidth, and often the
cores. Timed are the forward and backward pass of a block and of both ends of the model, the optimizer's update, and
copies in memory, which stand for what is sent. Left out: DeepSpeed's own work between the passes, what is summed over
tensor ranks (layers are timed whole and shared out evenly), and other machines.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from threading import Barrier
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megastable.config import RunConfig
from megastable.core.host import threads_per_process, usable_cpus
from megastable.core.partition import LAYERS_AT_EACH_END
from megastable.core.pipeline_cost import StageTime
from megastable.engine.host_memory import keep_freed_memory
from megastable.engine.optimizer import build_optimizer
from megastable.model.layers import Layer, gpt_layers
from megastable.model.loss import token_mean_loss
from megastable.model.tensor_parallel import OneProcess
from megastable.planning.calibration import CalibrationFile, calibration_file
from megastable.planning.measured_cost import (
    BLOCK,
    FIRST,
    LAST,
    Probe,
    line_through,
    mean_probe,
    planned_sizes,
    probed_cost,
    probed_sizes,
)
from megastable.planning.run_plan import RunPlan
from megastable.training.host import cpu_name, memory_gib_per_process

PROBE_SECONDS = 10.0
LEAST_ROUNDS = 2
START_TIMEOUT_SECONDS = 300.0
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
UPDATED_WEIGHTS = 4_000_000
"""More than caches hold, as in a real update."""


class PassSeconds(NamedTuple):
    """Holds what one run of a piece of the model took."""

    forward: float
    backward: float


def probe(plan: RunPlan, seconds: float = PROBE_SECONDS) -> CalibrationFile:
    """Measure this machine for a planned run."""
    threads = threads_per_process(plan.layout.world_size, os.environ)
    # Two processes on one core would measure how long each waits for the other.
    together = min(plan.layout.world_size, usable_cpus())
    sizes = probed_sizes(planned_sizes(plan))
    # Spawned, since a process that is forked from one in which torch runs threads may hang.
    context = multiprocessing.get_context("spawn")
    # A plain barrier can only be handed to a process as it starts, not be sent with a task; a manager's can.
    with context.Manager() as manager, ProcessPoolExecutor(together, context) as pool:
        start = manager.Barrier(together)
        running = [pool.submit(_probe_in_step, start, plan.run, sizes, threads, seconds) for _ in range(together)]
        probes = [future.result() for future in running]
    return calibration_file(
        plan,
        probed_cost(plan, mean_probe(probes)),
        method="probe",
        device=f"{cpu_name()}, {together} process(es) of {threads} thread(s) at a time",
        on_cpu=True,
        memory_gib=memory_gib_per_process(plan.layout.world_size),
    )


def _probe_in_step(start: Barrier, run: RunConfig, sizes: list[int], threads: int, seconds: float) -> Probe:
    """Measure once all processes have started: one that has the machine to itself would be too fast."""
    start.wait(START_TIMEOUT_SECONDS)
    return measure(run, sizes, threads, seconds)


def measure(run: RunConfig, sizes: list[int], threads: int, seconds: float) -> Probe:
    """Measure in this process, every piece in turn until the time is over, and take the median of each.

    Args:
        sizes: micro-batch sizes.
        threads: of this process.
        seconds: at least two rounds are measured, however long they take.
    """
    keep_freed_memory()  # as the engine does
    torch.set_num_threads(threads)
    torch.manual_seed(run.megastable.training.seed)
    pieces = {(name, size): piece for size in sizes for name, piece in _pieces(run, size).items()}
    update = _update(run)
    copy = _copy(run)

    started = time.perf_counter()
    # The first round, in which memory is mapped and kernels are chosen, takes its part of the time but does not count.
    for piece in pieces.values():
        piece()
    update()
    copy()
    measured: dict[tuple[str, int], list[PassSeconds]] = defaultdict(list)
    updates: list[float] = []
    copies: list[float] = []
    # In turns, so that a disturbance of some seconds falls on every piece alike.
    while len(updates) < LEAST_ROUNDS or time.perf_counter() - started < seconds:
        for key, piece in pieces.items():
            measured[key].append(piece())
        updates.append(update())
        copies.append(copy())

    passes = {}
    for name in (FIRST, BLOCK, LAST):
        forward = {size: statistics.median(took.forward for took in measured[name, size]) for size in sizes}
        backward = {size: statistics.median(took.backward for took in measured[name, size]) for size in sizes}
        passes[name] = StageTime(line_through(forward), line_through(backward))
    return Probe(passes, statistics.median(updates), statistics.median(copies))


def _pieces(run: RunConfig, size: int) -> dict[str, Callable[[], PassSeconds]]:
    """Build the pieces of the model: name to a function that runs it once on ``size`` samples and returns the times."""
    model = run.megastable.model
    training = run.megastable.training
    layers = gpt_layers(run, OneProcess())
    loss = token_mean_loss(model.vocab_size, OneProcess(), training.z_loss, training.loss_chunk_tokens)
    ids = torch.randint(0, model.vocab_size, (size, model.seq_length))
    # Labels, for which the ids will do, and the denominator of the mean.
    targets = (ids, torch.tensor(float(ids.numel())))
    hidden = torch.randn(size, model.seq_length, model.hidden_size, dtype=DTYPES[run.number_format], requires_grad=True)
    first = _chain(layers[:LAYERS_AT_EACH_END], run)
    last = _chain(layers[-LAYERS_AT_EACH_END:], run)
    block = _chain(layers[LAYERS_AT_EACH_END : LAYERS_AT_EACH_END + 1], run)

    def timed(piece: Callable[[], Tensor]) -> Callable[[], PassSeconds]:
        def once() -> PassSeconds:
            hidden.grad = None  # as the input of every micro-batch, which is a new tensor
            started = time.perf_counter()
            result = piece()
            between = time.perf_counter()
            result.backward(torch.ones_like(result))
            return PassSeconds(forward=between - started, backward=time.perf_counter() - between)

        return once

    return {
        FIRST: timed(lambda: first(ids)),
        BLOCK: timed(lambda: block(hidden)),
        LAST: timed(lambda: loss(last(hidden), targets)),
    }


def _chain(layers: list[Layer], run: RunConfig) -> Callable[[Tensor], Any]:
    """Join layers into one function; their gradients add up from call to call, as over micro-batches."""
    built: list[tuple[Layer, nn.Module]] = [(layer, layer.build(run).to(DTYPES[run.number_format])) for layer in layers]

    def forward(x: Tensor) -> Any:
        result: Any = x
        for layer, module in built:
            # An entry's own forward replaces that of its module: a tied head is an embedding used the other way round.
            result = module(result) if layer.forward is None else layer.forward(module, result)
        return result

    return forward


def _update(run: RunConfig) -> Callable[[], float]:
    """Make a function that returns the seconds a weight takes in the engine's update.

    Its gradient is widened, normed and clipped, its fp32 master updated, and the master copied back.
    """
    # In a module, since the optimizer is built for one.
    holder = nn.Linear(UPDATED_WEIGHTS // 1000, 1000, bias=False)
    master = holder.weight
    gradient = torch.randn_like(master).to(DTYPES[run.number_format])
    weights = torch.empty_like(master, dtype=DTYPES[run.number_format])
    master.grad = torch.empty_like(master)
    optimizer = build_optimizer(holder, run)

    @torch.no_grad()
    def once() -> float:
        started = time.perf_counter()
        assert master.grad is not None
        master.grad.copy_(gradient)
        master.grad.norm()
        master.grad.mul_(0.5)  # clips, whatever the coefficient
        optimizer.step()
        weights.copy_(master)
        return (time.perf_counter() - started) / master.numel()

    return once


def _copy(run: RunConfig) -> Callable[[], float]:
    """Make a function that returns the seconds a byte takes of what one sample sends to the next stage."""
    model = run.megastable.model
    message = torch.randn(model.seq_length, model.hidden_size).to(DTYPES[run.number_format])

    def once() -> float:
        started = time.perf_counter()
        message.clone()  # as a socket copies it, once in and once out
        return (time.perf_counter() - started) / message.nbytes

    return once
