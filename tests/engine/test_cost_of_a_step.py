"""What a step must not cost: memory for every micro-batch, and a call of CUDA in a run on the CPU."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import torch

from tests.support.launches import train_command, write_run_file
from tests.support.ranks import run_ranks
from tests.support.scripts import run_script
from tests.support.steps import build_engine, train
from tests.support.tiny_run import tiny_run


class _Saved:
    """Holds a tensor that autograd keeps for a backward pass, and counts those that are alive."""

    alive = 0
    peak = 0

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.size = tensor.numel()
        _Saved.alive += self.size
        _Saved.peak = max(_Saved.peak, _Saved.alive)

    def __del__(self) -> None:
        _Saved.alive -= self.size


def memory_of_a_step(num_micro_batches: int) -> dict[str, int]:
    """Count elements in a step: the most that autograd keeps at one time, and all tensors just before the update."""
    run = tiny_run(megastable__pipeline__num_stages=2, megastable__batch_rampup={"final": num_micro_batches})
    plan, engine = build_engine(run)
    state, _ = train(plan, engine, 1)  # buffers and moments are made
    optimizer = engine.deepspeed.optimizer
    step, sizes = optimizer.step, []

    def counted_step() -> None:
        gc.collect()
        tensors = (found for found in gc.get_objects() if isinstance(found, torch.Tensor))
        sizes.append(sum(tensor.numel() for tensor in tensors))
        step()

    optimizer.step = counted_step
    _Saved.peak = 0
    with torch.autograd.graph.saved_tensors_hooks(_Saved, lambda saved: saved.tensor):
        train(plan, engine, 1, state)
    return {"kept_by_autograd": _Saved.peak, "before_the_update": sizes[0], "left": _Saved.alive}


def test_memory_is_flat_over_many_micro_batches() -> None:
    few = run_ranks(memory_of_a_step, world_size=2, num_micro_batches=4)
    many = run_ranks(memory_of_a_step, world_size=2, num_micro_batches=40)
    for stage, (of_few, of_many) in enumerate(zip(few, many, strict=True)):
        assert of_few["kept_by_autograd"] > 10_000, "nothing was counted"
        # One forward and one backward pass in turns: a stage holds as many micro-batches as there are stages after it.
        assert of_many["kept_by_autograd"] == of_few["kept_by_autograd"], f"stage {stage}"
        assert of_many["left"] == of_few["left"] == 0
        # Token ids of the batch (16 and their labels a micro-batch) and losses may be there; an activation has 512.
        assert of_many["before_the_update"] <= of_few["before_the_update"] + 36 * 40, f"stage {stage}"


ALLOWED = (
    "is_available", "device_count", "is_initialized", "_is_compiled", "_is_in_bad_fork", "manual_seed",
    "manual_seed_all",
)  # fmt: skip
"""Questions whether there is a GPU, and what ``torch.manual_seed`` puts down for the case that one is used later."""


def record_calls_of_cuda(path: str) -> None:
    """Write every call of a function of ``torch.cuda``, with its caller, to a file for this rank."""
    import os
    import traceback

    file = Path(f"{path}.{os.environ['RANK']}")
    file.touch()

    def recorded(name: str, function: Any) -> Any:
        def call(*arguments: Any, **keywords: Any) -> Any:
            callers = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_stack(limit=4)[:-1]]
            with open(file, "a") as lines:
                lines.write(json.dumps({"call": name, "callers": callers}) + "\n")
            return function(*arguments, **keywords)

        return call

    for name, function in list(vars(torch.cuda).items()):
        if callable(function) and not isinstance(function, type) and name not in ALLOWED and not name.startswith("__"):
            setattr(torch.cuda, name, recorded(name, function))
    for name in ("cuda", "pin_memory"):
        setattr(torch.Tensor, name, recorded(f"Tensor.{name}", getattr(torch.Tensor, name)))


def test_a_run_on_the_cpu_makes_no_call_of_cuda(tmp_path: Path) -> None:
    run_file = write_run_file(
        tmp_path,
        megastable__training={"total_steps": 3, "seed": 7, "eval_interval": 2},
        megastable__checkpoint={"save_interval": 2},
        megastable__monitors={"interval": 2, "consistency_interval": 2},
    )
    calls = tmp_path / "calls"
    for flags in ([], ["--resume", "--set", "megastable.training.total_steps=4"]):
        words = train_command([], run_file, tmp_path / "run", *flags)
        finished = run_script(words, world_size=2, first=record_calls_of_cuda, path=str(calls))
        assert finished.exit_codes == [0, 0], finished.output
    found = [json.loads(line) for rank in (0, 1) for line in Path(f"{calls}.{rank}").read_text().splitlines()]
    assert found == []
