"""What a step costs on this CPU, measured in about ten seconds on a few of the model's own layers.

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
from multiprocessing.synchronize import Barrier
from typing import Any

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


def probe(plan: RunPlan, seconds: float = PROBE_SECONDS) -> CalibrationFile:
    """Measure this machine for a planned run."""
    threads = threads_per_process(plan.layout.world_size, os.environ)
    together = min(plan.layout.world_size, usable_cpus())
    sizes = probed_sizes(planned_sizes(plan))
    context = multiprocessing.get_context("spawn")
    start = context.Barrier(together)
    with ProcessPoolExecutor(together, context, initializer=_wait_with, initargs=(start,)) as pool:
        running = [pool.submit(_probe_in_step, plan.run, sizes, threads, seconds) for _ in range(together)]
        probes = [future.result() for future in running]
    return calibration_file(
        plan,
        probed_cost(plan, mean_probe(probes)),
        method="probe",
        device=f"{cpu_name()}, {together} process(es) of {threads} thread(s) at a time",
        on_cpu=True,
        memory_gib=memory_gib_per_process(plan.layout.world_size),
    )


def measure(run: RunConfig, sizes: list[int], threads: int, seconds: float) -> Probe:
    """Measure in this process, every piece in turn until the time is over, the first round left out."""
    keep_freed_memory()  # as the engine does
    torch.set_num_threads(threads)
    torch.manual_seed(run.megastable.training.seed)
    pieces = {(name, size): piece for size in sizes for name, piece in _pieces(run, size).items()}
    found: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    updates, copies = [], []
    update, copy = _update(run), _copy(run)
    started, rounds = time.perf_counter(), -1
    while rounds < LEAST_ROUNDS or time.perf_counter() - started < seconds:
        timed = {key: piece() for key, piece in pieces.items()}
        took_update, took_copy = update(), copy()
        rounds += 1
        if rounds > 0:
            updates.append(took_update)
            copies.append(took_copy)
            for key, value in timed.items():
                found[key].append(value)
    passes = {
        name: StageTime(*(
            line_through({size: statistics.median(pair[which] for pair in found[name, size]) for size in sizes})
            for which in (0, 1)
        ))
        for name in (FIRST, BLOCK, LAST)
    }  # fmt: skip
    return Probe(passes, statistics.median(updates), statistics.median(copies))


def _pieces(run: RunConfig, size: int) -> dict[str, Callable[[], tuple[float, float]]]:
    """Name -> a function that runs the piece once and tells the seconds of its forward and its backward pass."""
    model, dtype = run.megastable.model, DTYPES[run.number_format]
    layers = gpt_layers(run, OneProcess())
    training = run.megastable.training
    loss = token_mean_loss(model.vocab_size, OneProcess(), training.z_loss, training.loss_chunk_tokens)
    ids = torch.randint(0, model.vocab_size, (size, model.seq_length))
    targets = (ids, torch.tensor(float(ids.numel())))
    hidden = torch.randn(size, model.seq_length, model.hidden_size, dtype=dtype, requires_grad=True)
    first, last = _chain(layers[:LAYERS_AT_EACH_END], run), _chain(layers[-LAYERS_AT_EACH_END:], run)
    block = _chain(layers[LAYERS_AT_EACH_END : LAYERS_AT_EACH_END + 1], run)

    def timed(piece: Callable[[], Tensor]) -> Callable[[], tuple[float, float]]:
        def once() -> tuple[float, float]:
            hidden.grad = None
            started = time.perf_counter()
            result = piece()
            between = time.perf_counter()
            result.backward(torch.ones_like(result))
            return between - started, time.perf_counter() - between

        return once

    return {
        FIRST: timed(lambda: first(ids)),
        BLOCK: timed(lambda: block(hidden)),
        LAST: timed(lambda: loss(last(hidden), targets)),
    }


def _chain(layers: list[Layer], run: RunConfig) -> Callable[[Tensor], Any]:
    """The layers as one function; their gradients add up from call to call, as over micro-batches."""
    built: list[tuple[Layer, nn.Module]] = [(layer, layer.build(run).to(DTYPES[run.number_format])) for layer in layers]

    def forward(x: Tensor) -> Any:
        result: Any = x
        for layer, module in built:
            result = layer.forward(module, result) if layer.forward else module(result)
        return result

    return forward


def _update(run: RunConfig) -> Callable[[], float]:
    """Seconds a weight: its gradient widened, normed and clipped, one update of its fp32 master, the copy back."""
    holder = nn.Linear(UPDATED_WEIGHTS // 1000, 1000, bias=False)
    master, dtype = holder.weight, DTYPES[run.number_format]
    gradient = torch.randn_like(master).to(dtype)
    weights, master.grad = torch.empty_like(master, dtype=dtype), torch.empty_like(master)
    optimizer = build_optimizer(holder, run)

    @torch.no_grad()
    def once() -> float:
        started = time.perf_counter()
        assert master.grad is not None
        master.grad.copy_(gradient)
        master.grad.norm()
        master.grad.mul_(0.5)
        optimizer.step()
        weights.copy_(master)
        return (time.perf_counter() - started) / master.numel()

    return once


def _copy(run: RunConfig) -> Callable[[], float]:
    """Seconds a byte, of what one sample sends to the next stage."""
    model = run.megastable.model
    message = torch.randn(model.seq_length, model.hidden_size).to(DTYPES[run.number_format])

    def once() -> float:
        started = time.perf_counter()
        message.clone()
        return (time.perf_counter() - started) / message.nbytes

    return once


_start: Barrier | None = None


def _wait_with(start: Barrier) -> None:
    """A process of the pool begins; what it is to wait at cannot be sent with a task."""
    global _start
    _start = start


def _probe_in_step(run: RunConfig, sizes: list[int], threads: int, seconds: float) -> Probe:
    assert _start is not None
    _start.wait(START_TIMEOUT_SECONDS)
    return measure(run, sizes, threads, seconds)
