"""What a block sends to its tensor ranks: how often, and while what is computed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megastable.core.pieces import Shard
from megastable.model.block import TransformerBlock
from megastable.model.positions import POSITION_EMBEDDINGS
from megastable.model.tensor_parallel import ColumnParallelLinear, OneProcess, Work
from tests.support.tiny_run import tiny_run


class RecordingGroup(OneProcess):
    """Writes down when a sum starts and when it is waited for."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def start_all_reduce(self, x: Tensor) -> Work:
        """The sum over one rank."""
        self.events.append("start")
        return self

    def wait(self) -> None:
        """There is nothing to wait for."""
        self.events.append("wait")


class RecordedProducts(TorchDispatchMode):
    """Writes down every matrix product."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events = events

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "mm" in function.__name__:
            self.events.append("product")
        return function(*args, **(kwargs or {}))


def test_a_half_block_sums_once_in_each_direction() -> None:
    model = tiny_run(megastable__model__activation="swiglu").megastable.model
    group = RecordingGroup()
    block = TransformerBlock(model, POSITION_EMBEDDINGS["learned"](model, group), group)
    output = block(torch.randn(2, model.seq_length, model.hidden_size, requires_grad=True))
    assert group.events.count("start") == 2
    output.sum().backward()
    assert group.events.count("start") == 4


def test_the_sum_of_input_gradients_travels_during_the_weight_gradient() -> None:
    group = RecordingGroup()
    layer = ColumnParallelLinear(Shard.even((8, 4), 0, group.size, group.rank), group)
    torch.nn.init.ones_(layer.weight)
    output = layer(torch.randn(2, 3, 4, requires_grad=True))
    with RecordedProducts(group.events):
        output.sum().backward()
    assert group.events == ["product", "start", "product", "wait"]
