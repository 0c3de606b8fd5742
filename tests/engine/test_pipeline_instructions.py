"""Activations travel without copies of our own side, and logits do not outlive their loss."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.runtime.pipe import schedule
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.ranks import run_ranks
from tests.support.steps import build_engine, train
from tests.support.tiny_run import tiny_run

COPIES = {"clone", "copy_", "_to_copy"}


class CopiesOf(TorchDispatchMode):
    """Counts the copies that are made of the tensors of a list."""

    def __init__(self, watched: list[torch.Tensor | None]) -> None:
        super().__init__()
        self._addresses = {tensor.data_ptr() for tensor in watched if tensor is not None}
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation."""
        name = func.overloadpacket.__name__
        if name in COPIES and args[1 if name == "copy_" else 0].data_ptr() in self._addresses:
            self.count += 1
        return func(*args, **(kwargs or {}))


def copies_of_activations() -> dict[str, int]:
    """Copies of what was received over three steps, how much was received, and what the last stage holds at the end."""
    plan, engine = build_engine(tiny_run(megastable__pipeline__num_stages=2))
    pipeline, counts = engine.deepspeed, {"received": 0, "copied": 0}
    receive, forward = (pipeline._INSTRUCTION_MAP[kind] for kind in (schedule.RecvActivation, schedule.ForwardPass))

    def counted_receive(*arguments: Any, **keywords: Any) -> None:
        receive(*arguments, **keywords)
        counts["received"] += 1

    def counted_forward(*arguments: Any, **keywords: Any) -> None:
        received = [] if pipeline.is_first_stage() else pipeline.pipe_buffers["inputs"]
        with CopiesOf(received) as copies:
            forward(*arguments, **keywords)
        counts["copied"] += copies.count

    pipeline._INSTRUCTION_MAP = {
        **pipeline._INSTRUCTION_MAP,
        schedule.RecvActivation: counted_receive,
        schedule.ForwardPass: counted_forward,
    }
    train(plan, engine, 3)
    return {**counts, "held": sum(output is not None for output in pipeline.pipe_buffers["outputs"])}


def test_no_received_activation_is_copied_and_no_output_is_held() -> None:
    first, last = run_ranks(copies_of_activations, world_size=2)
    assert last["received"] > 0
    assert last["copied"] == 0
    assert first["held"] == last["held"] == 0
